"""Conversations that come back: the time to the first token of a second turn whose KV has left the device.

It does not know where the KV is kept, nor how loading or recomputing is chosen; it forces either, and compares.

All conversations together want four times the device's pool. First turns are asked one after the other, then second
turns in the same order, each once the tiers are at rest: with least-recently-used eviction none of it is on the device.
"""

import asyncio
import itertools
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from antiphon.plugins.bench.deployment import Deployment
from antiphon.plugins.bench.figures import BenchError, Figures
from antiphon.plugins.bench.measure import NEWS
from antiphon.plugins.doors.client import AsyncClient

TIMES = 4  # what the conversations want, in pools
BLOCK = 16  # tokens
ANSWER, OWN = 16, 32  # tokens of a first turn's answer; of the question after it
CLOSE = 1.2  # the bandwidth at which the model's choice changes is bracketed within this factor
REST = 600.0  # seconds that tiers may take to come to rest
QUEUE = "8GiB"  # nothing that is to be brought may be dropped before it was written


class Work(NamedTuple):
    """What to measure. ``sweep``: bandwidths in MB/s, rising; empty: none."""

    config: str
    settings: Sequence[str]
    conversations: int
    tokens: int  # of a first turn's prompt
    sweep: Sequence[int]
    runs: int


class Turns(NamedTuple):
    """Second turns: seconds to the first token of each, and the share of their tokens that came from tiers."""

    seconds: list[float]
    brought: float


class Sessions:
    """Measures and remembers."""

    def __init__(self, work: Work, say: Callable[[str], None]):
        self.work, self.say = work, say
        self.figures = Figures()

    def run(self) -> Figures:
        """Everything. Raises BenchError, and AntiphonError of the client."""
        if self.work.conversations < TIMES:
            raise BenchError(f"with fewer than {TIMES} conversations the pool could not hold one: ask for more", 2)
        none = self.measure("recompute", ())
        with tempfile.TemporaryDirectory(prefix="antiphon-sessions-") as home:
            disk = f"{{ plugin = 'disk', path = {str(Path(home) / 'kv')!r}, size = '64GiB', queue = '{QUEUE}' }}"
            for name, tier in (("ram", f"{{ plugin = 'ram', size = '{QUEUE}', queue = '{QUEUE}' }}"), ("disk", disk)):
                found = self.measure(name, tiered(tier, "auto"))
                self.figures.add(f"sessions speedup {name}", median(none) / median(found))
        if self.work.sweep:
            self.sweep()
        return self.figures

    def measure(self, name: str, settings: Sequence[str]) -> Turns:
        """One deployment's second turns."""
        self.say(f"second turns: {name}")
        pool = self.work.conversations * math.ceil((self.work.tokens + ANSWER + OWN + 1) / BLOCK) // TIMES
        layout = ("actors.allocator.plugin='hash'", f"actors.allocator.options.block_size={BLOCK}",
                  f"actors.allocator.options.blocks={pool}")
        with Deployment(self.work.config, [*self.work.settings, *layout, *settings]) as deployment:
            turns = asyncio.run(self._ask(deployment))
        for seconds in turns.seconds:
            self.figures.add(f"sessions ttft_ms {name}", seconds * 1e3)
        self.figures.add(f"sessions brought {name}", turns.brought)
        return turns

    async def _ask(self, deployment: Deployment) -> Turns:
        async with await deployment.connect(NEWS) as client:
            return await deployment.watched(self._turns(client))

    async def _turns(self, client: AsyncClient) -> Turns:
        seconds: list[float] = []
        asked = brought = 0
        for run in range(self.work.runs):
            draw = random.Random(run)  # noqa: S311 - prompts that a seed repeats
            prompts = [[draw.randrange(3, 250) for _ in range(self.work.tokens)]
                       for _ in range(self.work.conversations)]
            firsts = [(await client.generate(p, max_tokens=ANSWER, ignore_eos=True)).ids for p in prompts]
            for prompt, answer in zip(prompts, firsts, strict=True):
                before = (await at_rest(client))["allocator"]["tier_slots"]
                turn = [*prompt, *answer, *(draw.randrange(3, 250) for _ in range(OWN))]
                seconds.append((await client.generate(turn, max_tokens=1, ignore_eos=True)).ttft_s)
                brought += (await client.stats())["allocator"]["tier_slots"] - before
                asked += len(turn)
        return Turns(seconds, brought / asked)

    # ---- the sweep

    def sweep(self) -> None:
        """Loading forced, recomputing forced, and what the cost model chooses, by bandwidth of the tier."""
        recompute = median(self.measure("forced recompute", throttled(self.work.sweep[-1], "never")))
        loads: list[tuple[float, float]] = []
        chosen: list[tuple[float, bool]] = []
        for bandwidth in self.work.sweep:
            loads.append((bandwidth, median(self.measure(f"load {bandwidth}MB/s", throttled(bandwidth, "always")))))
            chosen.append((bandwidth, self.chooses(bandwidth)))
        if (even := break_even(loads, recompute)) is None:
            self.say("the sweep does not contain the break-even: widen --sweep")
        else:
            self.figures.add("sessions break_even_MB_s", even)
        if (switch := self.switch(chosen)) is None:
            self.say("the cost model chose the same over the whole sweep")
        else:
            self.figures.add("sessions switch_MB_s", switch)
            if even is not None:
                self.figures.add("sessions switch_off_by", max(switch / even, even / switch))

    def chooses(self, bandwidth: float) -> bool:
        """Whether the cost model loads most of what it could."""
        return self.measure(f"auto {bandwidth:g}MB/s", throttled(bandwidth, "auto")).brought > 0.45

    def switch(self, chosen: Sequence[tuple[float, bool]]) -> float | None:
        """The bandwidth at which the choice changes, by halving the gap; None: it does not."""
        pair = next((p for p in itertools.pairwise(chosen) if not p[0][1] and p[1][1]), None)
        if pair is None:
            return None
        low, high = pair[0][0], pair[1][0]
        while high / low > CLOSE:
            middle = round(math.sqrt(low * high), 1)
            low, high = (low, middle) if self.chooses(middle) else (middle, high)
        return math.sqrt(low * high)


def tiered(tier: str, bring: str) -> tuple[str, ...]:
    """Settings of a deployment with one tier, which takes its time to say what it holds."""
    return ("actors.pager.plugin='tiered'", f"actors.pager.options.tiers=[{tier}]", "actors.pager.options.load='300s'",
            "actors.pager.options.look='5s'", "actors.pager.options.stuck='60s'",
            "actors.allocator.options.find_deadline='10s'", "actors.allocator.options.transfer_deadline='300s'",
            f"actors.allocator.options.bring='{bring}'")


def throttled(bandwidth: float, bring: str) -> tuple[str, ...]:
    """RAM behind a line of so many MB/s."""
    # Sizes are whole numbers of bytes.
    inner = f"{{ plugin = 'ram', size = '{QUEUE}' }}"
    return tiered(f"{{ plugin = 'throttled', bandwidth = '{round(bandwidth * 1e6)}B/s', write = 'back', "
                  f"queue = '{QUEUE}', tier = {inner} }}", bring)


def median(turns: Turns) -> float:
    """Median seconds to the first token."""
    return statistics.median(turns.seconds)


def break_even(loads: Sequence[tuple[float, float]], recompute: float) -> float | None:
    """The bandwidth at which both take as long; seconds of loading are linear in 1 / bandwidth between two points."""
    for (slow, slow_s), (fast, fast_s) in itertools.pairwise(loads):
        if slow_s >= recompute > fast_s:
            share = (recompute - fast_s) / (slow_s - fast_s)
            return 1 / (1 / fast + share * (1 / slow - 1 / fast))
    return None


async def at_rest(client: AsyncClient) -> dict[str, Any]:
    """The deployment's facts once nothing moves. Raises BenchError: it does not come to rest."""
    ends = time.monotonic() + REST
    while time.monotonic() < ends:
        stats = await client.stats()
        moving = stats["allocator"]["holds"] or stats["pager"].get("pending")
        if not moving and not any(t["writing_bytes"] for t in stats["pager"].get("tiers", ())):
            return stats
        await asyncio.sleep(0.02)
    raise BenchError(f"the tiers did not come to rest within {REST:g} s")


def sessions(work: Work, say: Callable[[str], None]) -> Figures:
    """Measure. Raises BenchError, and AntiphonError of the client."""
    return Sessions(work, say).run()
