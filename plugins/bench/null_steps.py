"""The step of the null backend, taken apart: all actors in one cell on this thread, streams running, steady state.

It does not know real models. Each cell is measured in two kinds of windows:

- *whole*: the graph as it is. ``us_null`` is the processor time that the null backend's ``execute`` takes on the
  device thread (not its wall time, which counts the waits for the GIL that the runtime causes),
  ``us_without_null`` is the rest of the wall time, and ``us_cpu`` the processor time of loop and device thread
  without ``us_null``: other programs that run disturb it least.
- *hollow*: ``execute`` answers with zeros at once, so that nothing hides behind the computation, and a Meter splits
  the wall time ``us_hollow``: ``us_hops`` (the post: encode, send, receive, decode), ``us_scheduling`` (the
  scheduler's activity and the handlers of the step's actors), ``us_hand_over`` (queueing stages and the device
  thread's work around them; with ``direct`` the null backend's stages need no thread), ``us_stages`` (what is left of
  the stages, the verdict above all), ``us_front`` (tokenizer, gateway and door, which stand in a cell of their own by
  default), ``us_rest`` (the loop's turns, threads and tasks that wake, idle time; negative where the two threads
  overlap). Metering costs some microseconds itself.

The caller is a bare socket of this process whose answers stay unread while a window lasts. The meter looks into
private parts of the runtime; tests/behaviour/test_bench_command.py notices when they change.
"""

import asyncio
import contextlib
import gc
import itertools
import secrets
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import zmq

from antiphon.actors.executor import Batch, Output
from antiphon.plugins.bench.figures import BenchError, Figures
from antiphon.plugins.bench.meter import Meter
from antiphon.plugins.doors import wire
from antiphon.runtime import check, log
from antiphon.runtime.cell import SWITCH_INTERVAL, Cell
from antiphon.runtime.orders import CellSpec
from antiphon.runtime.plan import MAIN, gather

DELIVERIES = ("zmq", "direct")
PROMPT = 16  # tokens
SETTLE = 20  # steps after the last prefill before a window begins
PATIENCE = 60.0  # seconds for a stretch of work that takes a few
FRONT = ("gateway", "tokenizer")


class Work(NamedTuple):
    """What to measure. ``settings`` are overrides of ``config``, applied after the bench's own."""

    config: str
    settings: Sequence[str]
    batches: Sequence[int]
    deliveries: Sequence[str]
    steps: int
    runs: int


class Computation:
    """Stands before the null backend's ``execute``: times it, or answers in its place."""

    def __init__(self, backend: Any, hollow: bool):
        self.seconds = 0.0  # of processor time, on the device thread
        self._real: Callable[[Batch], Output] = backend.execute
        self._zeros = np.zeros((0, backend.facts().vocabulary), np.float32)
        backend.execute = self._hollow if hollow else self._timed

    def _timed(self, batch: Batch) -> Output:
        began = time.thread_time()
        output = self._real(batch)
        self.seconds += time.thread_time() - began
        return output

    def _hollow(self, batch: Batch) -> Output:
        rows = len(batch.logit_rows)
        if rows > len(self._zeros):
            self._zeros = np.zeros((rows, self._zeros.shape[1]), np.float32)
        return Output(self._zeros[:rows], {name: np.zeros((len(batch.ids), 2), np.int64) for name in batch.capture})


class Caller:
    """A client that sends frames and reads its answers only when told to."""

    def __init__(self, address: str):
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RCVHWM, 0)  # what is unread stays here
        self._socket.connect(address)
        self.counts: dict[bytes, int] = {}  # ids received by request of the running window
        self._send(wire.Hello(wire.MAJOR, wire.MINOR, agent="antiphon-bench"))
        self._send(wire.Grant(1 << 20))

    def generate(self, prompt: list[int], tokens: int) -> None:
        """Ask for ``tokens`` greedy tokens."""
        request = secrets.token_bytes(16)
        self.counts[request] = 0
        self._send(wire.Generate(request, ids=wire.pack(prompt), max_tokens=tokens, ignore_eos=True))

    def ping(self) -> None:
        """Show the gateway that we live."""
        self._send(wire.Ping())

    def cancel(self) -> None:
        """Cancel what is open."""
        for request in self.counts:
            self._send(wire.Cancel(request))

    def all_decode(self) -> bool:
        """Whether every stream has its first token. Raises BenchError: a request was refused."""
        self.read()
        return all(self.counts.values())

    def read(self) -> None:
        """Take what has arrived. Raises BenchError: a request was refused."""
        while self._socket.poll(0):
            message = wire.decode_from_server(self._socket.recv())
            if isinstance(message, wire.Refused):
                raise BenchError(f"the null deployment refused a request: {message.reason} ({message.kind})")
            for delta in message.deltas if isinstance(message, wire.Deltas) else ():
                if delta.id in self.counts:  # else it was on its way when the request was cancelled
                    self.counts[delta.id] += len(delta.ids) // 4

    def close(self) -> None:
        """Let the socket go."""
        self._context.destroy(linger=0)

    def _send(self, message: wire.FromClient) -> None:
        self._socket.send(wire.encode(message), zmq.NOBLOCK)


class Window(NamedTuple):
    """Readings at one moment."""

    at: float
    steps: int
    loop: float  # seconds of processor time: of this thread
    device: float  # of the device thread; 0 where stages run on this one
    stages: float  # of what the device thread spent in stages (hollow windows)
    null: float  # of the null computation (whole windows)
    spans: dict[str, float]


class Bed:
    """A cell with every actor built and none started; ``hollow`` puts meters in."""

    def __init__(self, cell: Cell, failures: list[str], hollow: bool):
        self.cell = cell
        self.failures = failures  # of actors
        actors = {runner.actor.kind: runner.actor for runner in cell.runners.values()}
        self.scheduler: Any = actors["scheduler"]
        self.gateway: Any = actors["gateway"]
        self.device: Any = actors["executor"].site.services["device"]
        self.computation = Computation(actors["executor"].site.plugin("backend"), hollow)
        self.meter = Meter()
        self._stages = 0.0
        if hollow:
            self._attach()

    def _attach(self) -> None:
        meter, post = self.meter, self.cell.post
        for name in ("tell", "_begin", "_send_back"):
            meter.replace(post, name, "hops")
        post._inbox.attach(meter.around("hops", post._receive), meter.around("hops", post._run_touched))
        for runner in self.cell.runners.values():
            kind = "front" if runner.actor.kind in FRONT else "scheduling"
            runner._handlers = {m: meter.around(kind, h) for m, h in runner._handlers.items()}
        put, site = self.device._put, self.scheduler.site
        spawn = site.spawn

        def put_timed(stage: Callable[[], Any], name: str, settle: Any, **more: Any) -> None:
            put(lambda: self._stage(stage), name, settle, **more)

        self.device._put = meter.around("hand_over", put_timed)
        site.spawn = lambda activity, name: spawn(meter.drive("scheduling", activity), name)

    def _stage(self, stage: Callable[[], Any]) -> Any:
        began = time.thread_time()
        try:
            return stage()
        finally:
            self._stages += time.thread_time() - began

    async def read(self) -> Window:
        """Readings now."""
        device = await self.device.submit(time.thread_time, "clock") if self.device.thread else 0.0
        return Window(time.perf_counter(), self.scheduler.clock["steps"], time.thread_time(), device, self._stages,
                      self.computation.seconds, dict(self.meter.seconds))

    async def window(self, caller: Caller, batch: int, steps: int) -> dict[str, float]:
        """Let ``batch`` streams run and take ``steps`` steps once all of them decode; figures by name."""
        tokens = lasting(steps)
        for r in range(batch):
            caller.generate([(7 * r + i) % 251 + 1 for i in range(PROMPT)], tokens)
        await self._until(caller.all_decode, caller)
        begin_at = self.scheduler.clock["steps"] + SETTLE
        await self._until(lambda: self.scheduler.clock["steps"] >= begin_at, caller)
        begin = await self.read()
        await self._until(lambda: self.scheduler.clock["steps"] >= begin.steps + steps, caller)
        end = await self.read()
        running = self.scheduler.facts()["running"]
        caller.cancel()
        await self._until(lambda: not self.gateway.facts()["open"], caller)
        caller.read()
        caller.counts.clear()
        if running != batch:
            raise BenchError(f"{batch - running} of {batch} streams had ended before the window was over")
        return figures_of(begin, end)

    async def _until(self, condition: Callable[[], object], caller: Caller) -> None:
        ends = time.monotonic() + PATIENCE
        for turn in itertools.count():
            if condition():
                return
            if self.failures:
                raise BenchError(f"the null deployment has failed: {self.failures[0]}")
            if time.monotonic() > ends:
                raise BenchError(f"the null deployment made no progress for {PATIENCE:g} s: {self.scheduler.facts()}")
            if turn % 500 == 499:
                caller.ping()
            await asyncio.sleep(0.002)


def lasting(steps: int) -> int:
    """Tokens of a stream that outlives a window of ``steps`` steps and the waits around it."""
    return 2 * steps + 500


def figures_of(begin: Window, end: Window) -> dict[str, float]:
    """Microseconds per step by name, and steps per second."""
    steps = end.steps - begin.steps

    def each(name: str) -> float:
        return float(getattr(end, name) - getattr(begin, name)) / steps * 1e6

    whole = each("at")
    if not end.spans:
        return {"steps_per_s": 1e6 / whole, "us_per_step": whole, "us_null": each("null"),
                "us_without_null": whole - each("null"), "us_cpu": each("loop") + each("device") - each("null")}
    spans = {kind: (s - begin.spans.get(kind, 0.0)) / steps * 1e6 for kind, s in end.spans.items()}
    split = {
        "us_hops": spans["hops"], "us_scheduling": spans["scheduling"],
        "us_hand_over": spans["hand_over"] + each("device") - each("stages"), "us_stages": each("stages"),
        "us_front": spans["front"],
    }
    return {"us_hollow": whole, **split, "us_rest": whole - sum(split.values()),
            "us_without_front": whole - split["us_front"]}


@contextlib.asynccontextmanager
async def bed(work: Work, delivery: str, hollow: bool) -> AsyncIterator[tuple[Bed, Caller]]:
    """A running cell and its caller."""
    most, tokens = max(work.batches), PROMPT + lasting(work.steps)
    with tempfile.TemporaryDirectory(prefix="antiphon-bench-") as directory:
        address = f"ipc://{directory}/door"
        plan, _ = check.examine(work.config, [
            "actors.executor.plugin='null'", "actors.tokenizer.plugin='bytes'", "log.level='warning'",
            f"actors.executor.options.context={tokens + 64}", f"actors.scheduler.options.max_running={most}",
            f"actors.allocator.options.blocks={most * (tokens // 16 + 4)}", *work.settings,
            f"actors.gateway.options.max_open={most}", f"actors.gateway.options.listen={address!r}",
            f"delivery={delivery!r}",
        ])
        failures: list[str] = []
        log.configure(plan.log.level, plan.log.format, plan.log.prompts)
        cell = Cell(CellSpec(gather(plan), MAIN, 1, directory, 0),
                    lambda instance, cause: failures.append(f"{instance} failed: {cause!r}"),
                    inproc=f"bench-{secrets.token_hex(4)}")
        try:
            if cell.build():
                found = Bed(cell, failures, hollow)
                await cell.start()
            if failures:
                raise BenchError(f"the null deployment did not start: {failures[0]}")
            caller = Caller(address)
            try:
                yield found, caller
            finally:
                caller.close()
        finally:
            await cell.stop(1.0)
            cell.close()


async def _all(work: Work, say: Callable[[str], None]) -> Figures:
    figures = Figures()
    for delivery in work.deliveries:
        found: dict[int, dict[str, list[float]]] = {batch: defaultdict(list) for batch in work.batches}
        for hollow in (False, True):
            async with bed(work, delivery, hollow) as (cell, caller):
                for batch in work.batches:
                    say(f"{delivery}, batch {batch}, {'taken apart' if hollow else 'whole'}")
                    for _ in range(work.runs):
                        for name, value in (await cell.window(caller, batch, work.steps)).items():
                            found[batch][name].append(value)
        for batch, values in found.items():
            figures.take(f"null {delivery} {batch}", values, delivery=delivery, batch=batch)
    return figures


def null_steps(work: Work, say: Callable[[str], None]) -> Figures:
    """Measure on this thread. Raises ConfigError for the config, BenchError if the deployment does not go on."""
    import uvloop

    with as_in_a_cell(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_all(work, say))


@contextlib.contextmanager
def as_in_a_cell() -> Iterator[None]:
    """The interpreter's settings of a cell's process."""
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(SWITCH_INTERVAL)
    gc.set_threshold(50_000, 20, 20)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*threshold)
