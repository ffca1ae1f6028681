"""One level of the hierarchy: a tier with its thread, its health, its queue and what was measured of it.

It does not know the other levels, devices or what payloads hold. Nothing here raises because of a tier: one that fails
holds nothing until it opens again.
"""

import asyncio
import functools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple, TypeVar

from antiphon.actors.tier import Tier, TierError, TierFull, TierOptions, Usage
from antiphon.plugins.pagers import records
from antiphon.plugins.pagers.estimate import Estimate
from antiphon.plugins.pagers.records import Payload
from antiphon.plugins.pagers.worker import LOOK, READ, WRITE, Worker
from antiphon.runtime.counters import Counters

T = TypeVar("T")
Item = tuple[bytes, Payload]  # storage key, payload
TURN = 0.05  # seconds that one call should take: the next look-up waits for it
CHEAP = 1e-4  # seconds
RECENT = 1 << 16  # keys remembered as written, so that an evicted block need not be read again
PROBES = (1 << 12, 1 << 18)  # bytes of the first two readings
TRIES = 3  # of each, while they are quick
COUNTERS = ("hits", "misses", "saved", "dropped", "corrupt", "errors", "late", "failures")


class Patience(NamedTuple):
    """Seconds: ``look`` for a look-up, ``stuck`` for any call, ``retry`` and at most ``longest`` before opening."""

    look: float
    stuck: float
    retry: float
    longest: float


_Taken = tuple[int, float]  # bytes, seconds


class _Read(NamedTuple):
    payloads: dict[bytes, memoryview]
    corrupt: list[bytes]
    amount: int
    seconds: float


class _Written(NamedTuple):
    gone: list[bytes]  # keys
    evicted: list[Item]  # those of them whose bytes are at hand
    amount: int
    seconds: float


class Level:
    """Made on the loop that uses it."""

    def __init__(self, name: str, tier: Tier[Any], patience: Patience, log: Any):
        options = tier.options
        assert isinstance(options, TierOptions)
        self.name = name
        self.back = options.write == "back"
        self.state: Literal["opening", "ok", "degraded", "closed"] = "opening"
        self.since = time.time()
        self.cause = ""
        self.counts = Counters(COUNTERS)
        self.usage = Usage()
        self.reads, self.writes = Estimate(), Estimate()
        self.reading = self.writing = 0  # bytes that wait or are under way
        self.recent: OrderedDict[bytes, None] = OrderedDict()
        self._tier = tier
        self._room = options.queue
        self._patience = patience
        self._log = log.bind(tier=name)
        self._worker = Worker(name)
        self._looks = 0  # look-ups that did not answer in time and have not answered yet
        self._fell, self._drained = asyncio.Event(), asyncio.Event()  # it failed; nothing waits to be written
        self._drained.set()
        self._puts = 0
        self._full_until = 0.0  # monotonic seconds
        self._first = self._observed = 0.0  # seconds a probe took when it opened; monotonic second of the last reading
        self._measured = self._cost = 0.0  # monotonic second of the last usage(), seconds it took

    @property
    def up(self) -> bool:
        """Whether it may be asked."""
        return self.state in ("opening", "ok")

    def facts(self) -> dict[str, Any]:
        """State, contents, counters, speed."""
        facts: dict[str, Any] = {
            "tier": self.name, "write": "back" if self.back else "through", "state": self.state, "since": self.since,
            **self.usage._asdict(), **self.counts, "latency_s": self.reads.latency, "bytes_per_s": self.reads.rate,
            "reading_bytes": self.reading, "writing_bytes": self.writing}
        return facts | ({"cause": self.cause} if self.cause else {})

    # ---- health

    async def keep(self) -> None:
        """Open the tier, and again when it has failed or got stuck; for ever."""
        while True:
            delay = self._patience.retry
            while not await self._opened():
                await asyncio.sleep(delay)
                delay = min(2 * delay, self._patience.longest)
            while not self._fell.is_set():
                try:
                    await asyncio.wait_for(self._fell.wait(), self._patience.stuck / 4)
                except TimeoutError:
                    since = self._worker.busy_since
                    if since and time.monotonic() - since > self._patience.stuck:
                        self._degrade(TierError(f"no answer within {self._patience.stuck:g} s"))
                    elif time.monotonic() - self._observed > self._patience.longest and self._shunned():
                        await self._measured_anew()
            await asyncio.sleep(self._patience.retry)

    async def _opened(self) -> bool:
        try:
            reads, writes = await self._worker.submit(self._open, LOOK)
        except Exception as cause:  # noqa: BLE001 - whatever it is, the tier is not there
            self._degrade(cause)
            return False
        self.reads.begin(*reads)
        self.writes.begin(*writes)
        self._first, self._observed = self.reads.seconds(PROBES[1]), time.monotonic()
        if self.state == "degraded":
            self._log.info("tier is back", after_s=round(time.time() - self.since, 3))
        self.state, self.since, self.cause = "ok", time.time(), ""
        self.recent.clear()  # what it held it may have lost
        self._fell.clear()
        return True

    def _shunned(self) -> bool:
        """Whether reads seem to take much longer than when it opened: then none may come that would show otherwise."""
        return self.reads.seconds(PROBES[1]) > 2 * self._first

    async def _measured_anew(self) -> None:
        self._observed = time.monotonic()
        try:
            probes = self._worker.submit(lambda: [self._probe(size)[:2] for size in PROBES], READ)
            taken = await asyncio.wait_for(probes, self._patience.stuck)
        except Exception as cause:  # noqa: BLE001 - a tier's failure is its own
            self._failed(cause)
        else:
            self.reads.begin(*taken)

    def _open(self) -> tuple[list[_Taken], list[_Taken]]:
        """On the worker. What the probes' readings and writings took."""
        self._tier.open()
        taken = [self._probe(size) for size in PROBES]
        self._measure()
        return [(size, read) for size, read, _ in taken], [(size, written) for size, _, written in taken]

    def _probe(self, size: int) -> tuple[int, float, float]:
        """Bytes, seconds to read them, seconds to write them."""
        key = records.storage_key(b"probe".ljust(32), size.to_bytes(32, "little"))
        record = records.wrap(key, bytes(size))
        read = written = float("inf")
        ends = time.monotonic() + TURN
        try:
            for _ in range(TRIES):  # the best counts: a busy machine only adds to what a tier takes
                written = min(written, _seconds(lambda: self._tier.put([(key, record)])))
                read = min(read, _seconds(lambda: self._get([key])))
                self._tier.drop([key])
                if time.monotonic() > ends:
                    break
        except TierFull:  # too small for the probe: the first calls will tell
            return size, 0.0, 0.0
        return size, read, written

    def _degrade(self, cause: BaseException) -> None:
        if self.up:
            self._log.warning("tier is degraded: it holds nothing until it opens again", cause=repr(cause))
            self.state, self.since = "degraded", time.time()
            self.counts.add("failures")
        self.cause = str(cause) or type(cause).__name__
        self._worker.fail(TierError(f"{self.name} is degraded: {self.cause}"))
        self._fell.set()

    def _failed(self, cause: BaseException) -> None:
        """A call failed; if it is not because the level is down already, it is now."""
        if self.up:
            self.counts.add("errors")
            self._degrade(cause)

    def _measure(self) -> None:
        """On the worker; at most once a second where it takes a while, as it does over a network."""
        if self._cost < CHEAP or time.monotonic() - self._measured > 1:
            self._measured = time.monotonic()
            self.usage = self._tier.usage()
            self._cost = time.monotonic() - self._measured

    # ---- look-ups and reads

    async def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Which records are there; none if it does not answer in time."""
        nothing = [False] * len(keys)
        if not self.up or self._looks or not keys:
            return nothing
        future = self._worker.submit(lambda: self._tier.has(keys), LOOK)
        try:
            there = await asyncio.wait_for(asyncio.shield(future), self._patience.look)
            if self.recent:
                self._forget(key for key, held in zip(keys, there, strict=True) if not held)
            return there
        except TimeoutError:
            self.counts.add("late")
            self._looks += 1
            future.add_done_callback(self._looked)
        except Exception as cause:  # noqa: BLE001 - a tier's failure is its own
            self._failed(cause)
        return nothing

    def _looked(self, late: "asyncio.Future[list[bool]]") -> None:
        self._looks -= 1
        if not late.cancelled() and (cause := late.exception()) is not None:
            self._failed(cause)

    def delay(self) -> float:
        """Seconds before the first byte of a read that begins now: what is under way comes first."""
        return self.reads.seconds(self.reading) + (min(TURN, self.writes.seconds(self.writing)) if self.writing else 0)

    async def get(self, keys: Sequence[bytes], size: int, ends: float) -> dict[bytes, memoryview]:
        """Payloads of the records that are there and whole, about ``size`` bytes each, until ``ends`` (loop time)."""
        found: dict[bytes, memoryview] = {}
        count = max(1, self.reads.amount(TURN) // max(1, size))
        loop = asyncio.get_running_loop()
        for begin in range(0, len(keys), count):
            if not self.up:
                break
            batch = keys[begin:begin + count]
            future = self._worker.submit(functools.partial(self._get, batch), READ)
            self.reading += size * len(batch)
            future.add_done_callback(functools.partial(self._read, size * len(batch)))
            try:
                read = await asyncio.wait_for(future, ends - loop.time())
            except TimeoutError:
                self.counts.add("late")
                break
            except Exception as cause:  # noqa: BLE001 - a tier's failure is its own
                self._failed(cause)
                break
            found |= read.payloads
            self._remember(read.payloads)
            self._forget(key for key in batch if key not in read.payloads)
            self.counts.add("hits", len(read.payloads))
            self.counts.add("misses", len(batch) - len(read.payloads))
            if read.corrupt:
                if not self.counts["corrupt"]:
                    self._log.warning("stored blocks are damaged: they are dropped and counted from now on")
                self.counts.add("corrupt", len(read.corrupt))
            if read.amount:
                self.reads.observe(read.amount, read.seconds)
                self._observed = time.monotonic()
        return found

    def _read(self, amount: int, _: object) -> None:
        self.reading -= amount

    def _get(self, keys: Sequence[bytes]) -> _Read:
        """On the worker: read and verify."""
        began = time.perf_counter()
        payloads, corrupt, amount = {}, [], 0
        for key, record in zip(keys, self._tier.get(keys), strict=True):
            if record is None:
                continue
            amount += len(record)
            try:
                payloads[key] = records.unwrap(key, record)
            except records.BadRecord:
                corrupt.append(key)
        seconds = time.perf_counter() - began
        if corrupt:
            self._tier.drop(corrupt)
            self._measure()
        return _Read(payloads, corrupt, amount, seconds)

    # ---- writes

    def takes(self, keys: Sequence[bytes], amount: int) -> bool:
        """Reserve room in the queue for records of ``amount`` bytes in all.

        False: it has them already, or cannot take them now; then they are dropped and counted.
        """
        if all(key in self.recent for key in keys):
            return False
        if self.writing + amount > self._room or not self.up or time.monotonic() < self._full_until:
            self.counts.add("dropped", len(keys))
            return False
        self.writing += amount
        return True

    async def put(self, items: Sequence[Item], reserved: int) -> list[Item]:
        """Keep payloads for which ``takes`` reserved room. Returns those that had to make room."""
        evicted: list[Item] = []
        self._puts += 1
        self._drained.clear()
        try:
            for batch in self._batches(items):
                if not self.up:
                    self.counts.add("dropped", len(batch))
                    continue
                try:
                    written = await self._worker.submit(functools.partial(self._put, batch), WRITE)
                except TierFull as cause:
                    self.counts.add("dropped", len(batch))
                    if not self._full_until:
                        self._log.warning("tier is full: nothing is written for a while", cause=str(cause))
                    self._full_until = time.monotonic() + self._patience.retry
                except Exception as cause:  # noqa: BLE001 - a tier's failure is its own
                    self.counts.add("dropped", len(batch))
                    self._failed(cause)
                else:
                    evicted += written.evicted
                    self._kept(batch, written)
        finally:
            self.writing -= reserved
            self._puts -= 1
            if not self._puts:
                self._drained.set()
        return evicted

    def _kept(self, batch: Sequence[Item], written: _Written) -> None:
        self.counts.add("saved", len(batch))
        self._full_until = 0.0
        if written.amount:
            self.writes.observe(written.amount, written.seconds)
        self._remember(key for key, _ in batch)
        self._forget(written.gone)

    def _remember(self, keys: Iterable[bytes]) -> None:
        self.recent.update(dict.fromkeys(keys))
        while len(self.recent) > RECENT:
            self.recent.popitem(last=False)

    def _forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.recent.pop(key, None)

    def _batches(self, items: Sequence[Item]) -> list[list[Item]]:
        """Cut so that no call takes much longer than a turn."""
        most = self.writes.amount(TURN)
        batches: list[list[Item]] = []
        size = most
        for item in items:
            if size >= most:
                batches.append([])
                size = 0
            batches[-1].append(item)
            size += len(item[1])
        return batches

    def _put(self, items: Sequence[Item]) -> _Written:
        """On the worker: what is there already is not written again."""
        began = time.perf_counter()
        there = self._tier.has([key for key, _ in items])
        wrapped = [(key, records.wrap(key, payload))
                   for (key, payload), has in zip(items, there, strict=True) if not has]
        evicted = self._tier.put(wrapped) if wrapped else []
        seconds = time.perf_counter() - began
        self._measure()
        spilled: list[Item] = []
        for key, record in evicted:
            with suppress(records.BadRecord):  # damaged in memory
                if record is not None:
                    spilled.append((key, records.unwrap(key, record)))
        return _Written([key for key, _ in evicted], spilled, sum(len(record) for _, record in wrapped), seconds)

    async def close(self, deadline: float) -> None:
        """Let what is queued be written until ``deadline`` (seconds from now), then close the tier."""
        ends = time.monotonic() + deadline
        if self.up:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), deadline)
        self.state = "closed"
        self._worker.fail(TierError(f"{self.name} is closed"))
        closed = self._worker.submit(self._tier.close, WRITE)
        closed.add_done_callback(lambda future: future.cancelled() or future.exception())
        await asyncio.get_running_loop().run_in_executor(None, self._worker.close, max(0.1, ends - time.monotonic()))


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
