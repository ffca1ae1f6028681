"""A backend driven directly: sequences whose blocks lie scattered, chunks of any size, trees.

It does not know what is computed.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from antiphon.actors.executor import Batch, Move, Output
from antiphon.actors.model import ModelSection
from antiphon.kernels import trees
from antiphon.plugins.backends.alone import Bare, pools
from antiphon.plugins.backends.torch import Torch, TorchOptions


class Rows(NamedTuple):
    """What one sequence adds in a step: ids, and parents where they form a tree."""

    sequence: int
    ids: Sequence[int]
    parents: Sequence[int] | None = None


class Driver:
    """Holds what the scheduler and the allocator would: lengths and block tables. Blocks come in random order."""

    def __init__(self, path: Path, *, dtype: Any = "float32", blocks: int = 96, block_size: int = 8, **options: Any):
        self.backend = Torch(TorchOptions(threads=1, **options), Bare(ModelSection(path=str(path), dtype=dtype)))
        self.facts = self.backend.facts()
        self.layout = pools(self.facts, blocks, block_size)
        self.windows = [groups[0].window for groups in self.layout.groups]
        self.backend.load(self.layout)
        self.random = np.random.default_rng(0)
        self.free = [list(self.random.permutation(blocks)) for _ in self.windows]
        self.lengths: list[int] = []
        self.tables: list[list[np.ndarray[Any, Any]]] = []  # by sequence, then by table

    def open(self) -> int:
        most = -(-self.facts.context // self.layout.block_size)
        self.lengths.append(0)
        self.tables.append([np.full(most, -1, np.int32) for _ in self.windows])
        return len(self.lengths) - 1

    def step(self, work: Iterable[Rows], logits: str = "all", capture: tuple[str, ...] = ()) -> Output:
        """Execute one step without committing it; ``logits`` of "all" rows, the "last" of each sequence, or "none"."""
        work = list(work)
        starts = [self.lengths[rows.sequence] for rows in work]
        positions, parents = [], []
        for rows, start in zip(work, starts, strict=True):
            local = np.array(rows.parents if rows.parents is not None else range(-1, len(rows.ids) - 1))
            positions.append(start + trees.depths(local))
            parents.append(local)
            self._grow(rows.sequence, start + len(rows.ids))
        offsets = np.cumsum([0] + [len(rows.ids) for rows in work], dtype=np.int32)
        wanted = {"all": np.arange(offsets[-1]), "last": offsets[1:] - 1, "none": np.arange(0)}[logits]
        tree = any(rows.parents is not None for rows in work)
        batch = Batch(
            np.array([rows.sequence for rows in work], np.int32),
            np.array(starts, np.int32),
            offsets,
            np.concatenate([np.array(rows.ids, np.int32) for rows in work]),
            np.concatenate(positions).astype(np.int32),
            np.concatenate(parents).astype(np.int32) if tree else None,
            tuple(np.stack([self.tables[rows.sequence][t] for rows in work]) for t in range(len(self.windows))),
            wanted.astype(np.int32),
            capture,
        )
        for column in (*batch[:5], *batch.tables):
            column.setflags(write=False)  # as columns from messages are
        return self.backend.execute(batch)

    def commit(self, sequence: int, kept: Sequence[int]) -> None:
        """Keep these local rows of the last step: line up their slots, then forget blocks that left a window."""
        start = self.lengths[sequence]
        self.backend.move(
            [
                Move(t, *self._slot(sequence, t, start + row), *self._slot(sequence, t, start + target))
                for target, row in enumerate(kept)
                for t in range(len(self.windows))
                if row != target
            ]
        )
        self.lengths[sequence] += len(kept)
        for t, window in enumerate(self.windows):
            for entry in range(max(0, self.lengths[sequence] + 1 - window) // self.layout.block_size if window else 0):
                if (block := self.tables[sequence][t][entry]) >= 0:
                    self.free[t].append(block)
                    self.tables[sequence][t][entry] = -1

    def feed(self, prompts: Sequence[Sequence[int]], chunks: Sequence[int] = (1 << 20,)) -> list[tuple[int, Any]]:
        """Open and prefill sequences side by side, each in chunks of these sizes, the last one repeated.

        Sequence and logits of all rows [prompt, vocabulary] by prompt. A step mixes chunks of unlike sizes.
        """
        sequences = [self.open() for _ in prompts]
        found: list[list[torch.Tensor]] = [[] for _ in prompts]
        turn = 0
        while work := [n for n, ids in enumerate(prompts) if self.lengths[sequences[n]] < len(ids)]:
            rows = []
            for n in work:
                at, size = self.lengths[sequences[n]], chunks[min(turn + n % len(chunks), len(chunks) - 1)]
                rows.append(Rows(sequences[n], prompts[n][at : at + size]))
            parts = self.step(rows).logits.split([len(row.ids) for row in rows])
            for n, row, part in zip(work, rows, parts, strict=True):
                found[n].append(part)
                self.commit(row.sequence, range(len(row.ids)))
            turn += 1
        return [(sequence, torch.cat(parts)) for sequence, parts in zip(sequences, found, strict=True)]

    def greedy(self, prompts: Sequence[Sequence[int]], tokens: int, chunks: Sequence[int]) -> list[Any]:
        """Continue prompts together by greedy ids; ids and logits [prompt + tokens - 1, vocabulary] by prompt."""
        fed = self.feed(prompts, chunks)
        sequences, logits = [sequence for sequence, _ in fed], [[rows] for _, rows in fed]
        ids = [[int(rows[-1][-1].argmax())] for rows in logits]
        for _ in range(tokens - 1):
            output = self.step([Rows(s, i[-1:]) for s, i in zip(sequences, ids, strict=True)], "last")
            for n, sequence in enumerate(sequences):
                self.commit(sequence, [0])
                logits[n].append(output.logits[n : n + 1])
                ids[n].append(int(output.logits[n].argmax()))
        return [(i, torch.cat(rows)) for i, rows in zip(ids, logits, strict=True)]

    def _slot(self, sequence: int, table: int, slot: int) -> tuple[int, int]:
        size = self.layout.block_size
        return int(self.tables[sequence][table][slot // size]), slot % size

    def _grow(self, sequence: int, slots: int) -> None:
        for t, table in enumerate(self.tables[sequence]):
            for entry in range(self.lengths[sequence] // self.layout.block_size, -(-slots // self.layout.block_size)):
                if table[entry] < 0:
                    table[entry] = self.free[t].pop(0)
