"""What paging KV memory saves: slots taken and not used, and how many sequences run at once in a fixed amount of it.

It does not know real models: the null backend computes. The same requests of mixed lengths, all asked at once, run in
the same memory twice: *paged*, as the config says, and *whole*, where a block is as long as a sequence may be. The
ledger is read after each step's ``Commit``, so a figure is a mean over steps and hardly depends on the machine:

- ``waste_pct``: slots of blocks that sequences hold and no token fills (slots granted ahead are some while memory is
  plenty), in per cent of the slots of these blocks; ``waste_pct_window`` the same in the window's table, where blocks
  are almost as long as the window and what it has passed is waste too;
- ``at_once``: sequences that hold blocks, over the steps in which others waited; ``at_once_peak``: most of them;
- ``at_once_ratio``: paged beside whole.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from antiphon.actors.ledger import QUARANTINE, TRANSFER, Ledger
from antiphon.actors.protocol import Commit
from antiphon.actors.survey import unused
from antiphon.plugins.bench.figures import BenchError, Figures
from antiphon.plugins.doors.client import AsyncClient
from antiphon.plugins.doors.llm import LLM

CONTEXT = 4096  # most tokens of a sequence
LENGTHS = 8  # sequences of that length that fill the memory
SLOT_BYTES = 48  # of the null backend's three groups
PROMPT, ANSWER = (64, 2048), (32, 256)  # least and most tokens; prompts are spread evenly over their logarithms
NEWS = 600.0  # seconds without a token after which the bench gives up
FREE, CACHED, MOVING, QUARANTINED, OTHER, ACTIVE = range(6)  # states of a block; from ACTIVE on: which request has it


class Work(NamedTuple):
    """What to measure. ``settings`` are overrides of ``config``, applied after the bench's own."""

    config: str
    settings: Sequence[str]
    requests: int
    runs: int


class BlockMap(NamedTuple):
    """States of the blocks of the first table over time, [steps, blocks]."""

    size: int
    states: npt.NDArray[np.int32]


class Recorder:
    """Reads the ledger of a cell after each step. ``mapped``: the state of every block too."""

    def __init__(self, cell: Any, mapped: bool):
        runners = {runner.actor.kind: runner for runner in cell.runners.values()}
        self._allocator: Any = runners["allocator"].actor
        self._scheduler: Any = runners["scheduler"].actor
        self._mapped = mapped
        self._colours: dict[str, int] = {}  # by owner, in the order in which they came
        self.taken: list[list[int]] = []  # per step and table: slots that sequences hold
        self.waste: list[list[int]] = []  # and of them those that hold nothing
        self.at_once: list[tuple[int, bool]] = []  # sequences with blocks; whether others waited
        self.states: list[npt.NDArray[np.int32]] = []
        handlers = runners["allocator"]._handlers
        commit = handlers[Commit]

        def committed(message: Commit) -> None:
            commit(message)
            self._take()

        handlers[Commit] = committed

    def _take(self) -> None:
        ledger, prefixes = self._allocator.ledger, self._allocator.prefixes
        running = sum(bool(h.blocks[0]) for h in ledger.holds.values() if h.reason == "sequence")
        if running:
            self.taken.append([held * prefixes.size for held in ledger.held])
            self.waste.append(unused(prefixes))
            self.at_once.append((running, bool(self._scheduler.roster.waiting)))
        if self._mapped:
            self.states.append(states_of(ledger, self._colours))

    def figures(self) -> dict[str, float]:
        """Figures by name. Raises BenchError: nothing ran."""
        if not self.taken:
            raise BenchError("no step of the null deployment was seen")
        share = 100 * np.sum(self.waste, axis=0) / np.maximum(1, np.sum(self.taken, axis=0))
        crowded = [running for running, others in self.at_once if others] or [r for r, _ in self.at_once]
        return {"waste_pct": float(share[0]), **({"waste_pct_window": float(share[1])} if len(share) > 1 else {}),
                "at_once": float(np.mean(crowded)), "at_once_peak": float(max(r for r, _ in self.at_once))}

    @property
    def slots(self) -> int:
        """Size of the first table's pool."""
        return int(self._allocator.ledger.total[0] * self._allocator.prefixes.size)

    def map(self) -> BlockMap:
        """The block map, if it was asked for."""
        return BlockMap(self._allocator.prefixes.size, np.array(self.states))


def states_of(ledger: Ledger, colours: dict[str, int]) -> npt.NDArray[np.int32]:
    """State of each block of table 0; ``colours`` numbers the owners and grows."""
    states = np.full(ledger.total[0], FREE, np.int32)
    states[list(ledger.cached[0])] = CACHED
    other = {TRANSFER: MOVING, QUARANTINE: QUARANTINED}
    # Sequences last: what is read by a transfer and held by a sequence too is active.
    for hold in sorted(ledger.holds.values(), key=lambda h: h.reason == "sequence"):
        if hold.reason == "sequence":
            state = ACTIVE + colours.setdefault(hold.owner, len(colours))
        else:
            state = other.get(hold.reason, OTHER)
        blocks = np.array(hold.blocks[0], dtype=np.int64)
        states[blocks[blocks >= 0]] = state
    return states


def requests(count: int, seed: int) -> list[tuple[list[int], int]]:
    """Prompts and how many tokens are asked for of each: mixed lengths, nothing in common."""
    draw = random.Random(seed)  # noqa: S311 - a workload, no secret
    low, high = PROMPT
    lengths = [round(low * (high / low) ** draw.random()) for _ in range(count)]
    return [([draw.randrange(1, 256) for _ in range(length)], draw.randint(*ANSWER)) for length in lengths]


def run_once(work: Work, seed: int, more: Sequence[str], mapped: bool) -> Recorder:
    """Ask everything in a deployment of its own. Raises BenchError, AntiphonError, ConfigError."""
    asked = requests(work.requests, seed)
    settings = [
        "actors.executor.plugin='null'", "actors.tokenizer.plugin='bytes'", "actors.allocator.plugin='hash'",
        f"actors.allocator.options.memory='{CONTEXT * LENGTHS * SLOT_BYTES}B'",
        f"actors.executor.options.context={CONTEXT}", *work.settings,
        f"actors.gateway.options.max_open={work.requests}", *more,
    ]
    with LLM(config=work.config, settings=settings, timeout=NEWS) as llm:
        recorder: Recorder = llm.graph.call(lambda cell: Recorder(cell, mapped))
        asyncio.run(_ask(llm.address, asked))
        llm.graph.check()
        return recorder


async def _ask(address: str, asked: Sequence[tuple[list[int], int]]) -> None:
    async with AsyncClient(address, timeout=NEWS) as client:
        await asyncio.gather(*(client.generate(ids, max_tokens=n, ignore_eos=True) for ids, n in asked))


def memory(work: Work, say: Callable[[str], None], mapped: bool = False) -> tuple[Figures, BlockMap | None]:
    """Measure; with ``mapped`` the block map of the first paged run too."""
    found: dict[str, dict[str, list[float]]] = {"paged": {}, "whole": {}}
    block_map: BlockMap | None = None
    slots: dict[str, int] = {}
    for run in range(1, work.runs + 1):
        for name, more in (("paged", ()), ("whole", (f"actors.allocator.options.block_size={CONTEXT}",))):
            say(f"run {run} of {work.runs}: {name}")
            wanted = mapped and block_map is None
            recorder = run_once(work, run, more, wanted)
            block_map = recorder.map() if wanted else block_map
            slots[name] = recorder.slots
            for figure, value in recorder.figures().items():
                found[name].setdefault(figure, []).append(value)
        if slots["whole"] > slots["paged"]:
            raise BenchError("the runs had unlike amounts of KV: set actors.allocator.options.memory, not blocks", 2)
    whole = found["whole"]["at_once"]
    figures = Figures()
    for name, values in found.items():
        values["at_once_ratio"] = [a / b for a, b in zip(values["at_once"], whole, strict=True)]
        figures.take(f"memory {name}", values, requests=work.requests)
    return figures, block_map
