"""Faults to plant: backends that err in one way each, and wounds to give to running actors.

Backends are used as ``./tests/faults.py:Uncompacted``; wounds are functions of a cell inside the test's process. They
do not know what notices them.
"""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np

from antiphon.actors.executor import Batch, Executor, Move, Output
from antiphon.actors.protocol import Commit
from antiphon.plugins.backends.null import Null, NullOptions
from antiphon.runtime.cell import Cell
from antiphon.runtime.plugin import Site

HERE = Path(__file__).resolve()


def backend(name: str) -> str:
    """Override that makes a class of this file the backend."""
    return f"actors.executor.plugin='{HERE}:{name}'"


class Unrolled(Null):
    """Counts the slots of rejected drafts as valid: what follows is written behind them."""

    def __init__(self, options: NullOptions, site: Site):
        super().__init__(options, site)
        self.ends: dict[int, tuple[int, int]] = {}  # sequence -> first slot not written, slots never taken back

    def execute(self, batch: Batch) -> Output:
        """Shift the starts by what was rejected so far."""
        starts = batch.starts.copy()
        for r, sequence in enumerate(batch.sequences.tolist()):
            start, rows = int(starts[r]), int(batch.row_offsets[r + 1] - batch.row_offsets[r])
            end, extra = self.ends.get(sequence, (start, 0))
            extra = extra + max(0, end - start) if start else 0
            self.ends[sequence] = start + rows, extra
            starts[r] += extra
        return super().execute(batch._replace(starts=starts))


class Uncompacted(Null):
    """Leaves the kept rows of a tree where they are."""

    def move(self, moves: list[Move]) -> None:
        """Do nothing."""


class Misled(Null):
    """Reads one wrong block: the first sequence's first block is taken for the second's."""

    def execute(self, batch: Batch) -> Output:
        """Change an entry of a step's own copy of the tables."""
        if len(batch.sequences) < 2:
            return super().execute(batch)
        tables = tuple(t.copy() for t in batch.tables)
        for table in tables:
            table[0, 0] = table[1, 0]
        return super().execute(batch._replace(tables=tables))


class Poisoned(Null):
    """Its process is killed by any step that computes token 511 at an even position."""

    def execute(self, batch: Batch) -> Output:
        """Compute, or die."""
        if np.any((batch.ids == 511) & (batch.positions % 2 == 0)):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().execute(batch)


class FreedTooEarly:
    """Once, the allocator takes a block from a sequence that uses it and gives it to another.

    ``blind`` makes the ledger tolerate what follows, as an allocator without reference counts would. ``audit`` holds
    what the ledger said right after.
    """

    def __init__(self, blind: bool):
        self.blind = blind
        self.audit: list[str] = []

    def __call__(self, cell: Cell) -> None:
        """Wound the allocator of a cell."""
        allocator: Any = cell.runners["allocator"].actor
        on_commit = allocator.on_commit

        def commit(message: Commit) -> None:
            on_commit(message)
            holds = sorted(allocator.contexts, key=lambda key: -len(allocator.ledger.holds[key].blocks[0]))
            if not self.audit and len(holds) > 1 and allocator.progress.length(holds[0]) > 32:
                self._wound(allocator, *holds[:2])

        cell.runners["allocator"]._handlers[Commit] = commit

    def _wound(self, allocator: Any, robbed: int, other: int) -> None:
        ledger = allocator.ledger
        block = ledger.holds[robbed].blocks[0][0]
        ledger.references[0][block] = 0
        ledger.free[0].append(block)
        for table, index, taken in ledger.take(other, len(ledger.holds[other].blocks[0]) + 1):
            allocator.prefixes.change(other, table, index, taken)
        assert ledger.holds[other].blocks[0][-1] == block
        self.audit = ledger.audit().faults
        ledger.references[0][block] += self.blind


def drop_pending(cell: Cell) -> None:
    """The executor takes token 0 for every token that is not yet known on the host."""
    executor: Any = cell.runners["executor"].actor
    assert isinstance(executor, Executor)
    executor._resolve = lambda ids, _step: np.maximum(ids, 0)  # type: ignore[method-assign]


def untouched(_cell: Cell) -> None:
    """No fault: the same test must pass."""
