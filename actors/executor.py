"""The executor owns the cell's device table and device thread: weights and KV pools.

It does not know requests, text, or why rows are computed.
"""

import asyncio
import time
from typing import Any, ClassVar, NamedTuple

import numpy as np

from antiphon.actors.columns import I32, index_of, indexes, unpack
from antiphon.actors.device import Device
from antiphon.actors.model import Facts
from antiphon.actors.protocol import (
    Close,
    Commit,
    Configured,
    Describe,
    Described,
    Execute,
    Executed,
    Fork,
    Handle,
    Inspect,
    Load,
    Loaded,
    Open,
    Report,
)
from antiphon.actors.rows import NO_ROWS, RowParams, SequenceParams
from antiphon.runtime.actor import Actor, ActorSite
from antiphon.runtime.message import Buffer
from antiphon.runtime.plugin import O, Options, Plugin

Pools = Configured  # how KV memory is laid out, as the allocator answers it


class Batch(NamedTuple):
    """One step's rows, resolved: no pending ids, block tables looked up. R sequences, N rows, L logit rows.

    Local row i of a sequence writes KV slot ``starts[r] + i`` and sees the slots before ``starts[r]`` and, of
    its own rows, itself and its ancestors. Without a tree slot and position are equal.
    """

    sequences: I32  # [R] dense indexes
    starts: I32  # [R] KV slots that are valid before this step
    row_offsets: I32  # [R + 1]
    ids: I32  # [N]
    positions: I32  # [N] for RoPE and windows
    parents: I32 | None  # [N] local row of the parent, -1 for a sequence's first row; None: all rows are chains
    tables: tuple[I32, ...]  # per block table [R, most blocks], -1 beyond the end; groups name theirs
    logit_rows: I32  # [L] rows whose logits are wanted
    capture: tuple[str, ...] = ()  # hidden states wanted: "input:3", "output:29"


class Output(NamedTuple):
    """What a step computes: ``logits`` [L, vocabulary] float32 (device array), hidden states by name [N, hidden]."""

    logits: Any
    hidden: dict[str, Any]


class Move(NamedTuple):
    """Copy one KV slot onto another, in every group of a table."""

    table: int
    from_block: int
    from_slot: int
    to_block: int
    to_slot: int


class Backend(Plugin[O]):
    """Contract of a ``backend``: computes steps on one device. All methods but ``facts`` run on the device thread."""

    kind: ClassVar[str] = "backend"
    instant: bool = False  # stages take microseconds: with ``direct`` delivery they need no thread
    where: ClassVar[frozenset[str]] = frozenset({"device"})

    def facts(self) -> Facts:
        """Describe the model from its header, quickly and without reading weights."""
        raise NotImplementedError

    def load(self, pools: Pools) -> None:
        """Read the weights and allocate the KV pools."""
        raise NotImplementedError

    def execute(self, batch: Batch) -> Output:
        """Write the rows' KV, attend through the block tables, return logits of ``logit_rows``."""
        raise NotImplementedError

    def move(self, moves: list[Move]) -> None:
        """Copy slots in order; used to line up the kept rows of a tree."""
        raise NotImplementedError

    def reduce(self, logits: Any, params: RowParams) -> list[Any]:
        """Cut logits [L, vocabulary] to what a verifier in another cell needs, as buffers."""
        raise NotImplementedError


class ExecutorOptions(Options, frozen=True):
    """The executor has no options of its own."""


class Executor(Actor[ExecutorOptions]):
    """Resolves a step's rows (pending ids, block tables, ancestors) and queues them on the device thread."""

    kind = "executor"
    plugs = ("backend",)
    sections = ("model",)
    provides = ("device",)

    def __init__(self, options: ExecutorOptions, site: ActorSite):
        super().__init__(options, site)
        self.backend: Backend[Any] = site.plugin("backend")
        self.device = site.services["device"] = Device(
            site.post.cell, site.post.epoch, thread=not (self.backend.instant and site.post.direct))
        self.pools: Pools | None = None
        self.tables: tuple[I32, ...] = ()  # mirrors [sequence index, most], -1 beyond the end
        self.most: list[int] = []
        self.params = SequenceParams()
        # Notes of the last Commit, taken at one moment so that a bench can compare: how many, when, stage seconds.
        self.committed: dict[str, Any] = {"commits": 0, "committed_at": 0.0, "committed_stages_s": {}}

    async def stop(self, deadline: float) -> None:
        """End the device thread."""
        await asyncio.get_running_loop().run_in_executor(None, self.device.close, deadline)

    def facts(self) -> dict[str, Any]:
        """Work of the device thread."""
        return {"stages": self.device.stages, "busy_s": self.device.busy, **self.committed}

    def on_describe(self, message: Describe) -> Described:
        """Facts from the model's header."""
        return Described(self.backend.facts())

    def on_load(self, message: Load) -> "asyncio.Future[Loaded]":
        """Read the weights and allocate the pools."""
        began = time.monotonic()
        self.pools = message.pools
        widest = -(-self.backend.facts().context // message.pools.block_size)
        most = [max(1, min(n, widest)) for n in message.pools.blocks]
        self.tables = tuple(np.full((64, m), -1, dtype=np.int32) for m in most)

        def load() -> Loaded:
            self.backend.load(message.pools)
            return Loaded(time.monotonic() - began)

        return self.device.submit(load, "load")

    def on_open(self, message: Open) -> None:
        """Begin a mirror row of the block tables."""
        index = index_of(message.sequence)
        self.params.open(index, message)
        while index >= len(self.tables[0]):
            self.tables = tuple(np.vstack([t, np.full_like(t, -1)]) for t in self.tables)
        for table in self.tables:
            table[index] = -1

    def on_fork(self, message: Fork) -> None:
        """The new sequence reads what its source reads until changes say otherwise."""
        index = index_of(message.sequence)
        self.params.fork(index, index_of(message.source), message.sample)
        for table in self.tables:
            table[index] = table[index_of(message.source)]

    def on_close(self, message: Close) -> None:
        """Drop the mirror rows."""
        for table in self.tables:
            table[indexes(unpack(message.sequences))] = -1

    def on_execute(self, message: Execute) -> "Executed | asyncio.Future[Executed]":
        """Queue a step. The mirror changes now, in message order; the stage works on its own copies."""
        for sequence, table, index, block in unpack(message.changes).reshape(-1, 4):
            self.tables[table][index_of(int(sequence)), index] = block
        batch, params = self._batch(message)
        logits = self.device.promise(message.step)
        hidden = {name: self.device.promise(message.step) for name in message.capture}

        def stage() -> Executed:
            try:
                rows = batch._replace(ids=self._resolve(batch.ids, message.pending_step))
                output = self.backend.execute(rows)
            except Exception as cause:
                for handle in (logits, *hidden.values()):
                    self.device.fulfil(handle, cause)
                raise
            self.device.fulfil(logits, output.logits)
            for name, handle in hidden.items():
                self.device.fulfil(handle, output.hidden[name])
            if not message.reduce:
                return Executed(logits, hidden)
            frames = self.backend.reduce(output.logits, params)
            return Executed(None, hidden, tuple(Buffer(f) for f in frames))

        if message.reduce or message.finish:
            return self.device.submit(stage, "execute")
        self.device.enqueue(stage, "execute")  # a failure reaches the verifier through the handle
        return Executed(logits, hidden)

    def on_commit(self, message: Commit) -> "asyncio.Future[None] | None":
        """Line up the KV of kept tree rows, then let the step's handles go. A move that fails is our own failure."""
        moves = self._moves(message)
        moved = self.device.submit(lambda: self.backend.move(moves), "move") if moves else None
        self.device.release(message.step)
        self.committed = {"commits": self.committed["commits"] + 1, "committed_at": time.perf_counter(),
                          "committed_stages_s": self.device.spent.copy()}
        return moved

    def on_inspect(self, message: Inspect) -> Report:
        """Facts for an operator."""
        return Report(self.facts())

    def _batch(self, message: Execute) -> tuple[Batch, RowParams]:
        sequences = indexes(unpack(message.sequences))
        offsets = unpack(message.row_offsets)
        positions = unpack(message.positions)
        logit_rows = unpack(message.logit_rows)
        starts = unpack(message.starts)
        parents = unpack(message.parents) if message.parents else None
        assert self.pools is not None
        # The blocks that rows reach: positions are slots but for trees, whose depth is less than their rows.
        used = int(positions.max() + (0 if parents is None else len(parents))) // self.pools.block_size + 1
        batch = Batch(
            sequences, starts, offsets, unpack(message.ids), positions, parents,
            tuple(t.take(sequences, axis=0)[:, :used] for t in self.tables), logit_rows, message.capture,
        )
        if not message.reduce:
            return batch, NO_ROWS
        owner = np.searchsorted(offsets, logit_rows, side="right") - 1
        return batch, self.params.rows(sequences[owner], positions[logit_rows] + 1)

    def _resolve(self, ids: I32, step: int) -> I32:
        """Replace pending ids -(1 + row) by the tokens that step ``step`` chose (device thread)."""
        pending = np.flatnonzero(ids < 0)
        if not len(pending):
            return ids
        chosen = self.device.chosen[step]
        resolved = ids.copy()
        resolved[pending] = chosen[-1 - ids[pending]]
        return resolved

    def _moves(self, message: Commit) -> list[Move]:
        if not message.kept or self.pools is None:
            return []
        kept = unpack(message.kept)
        offsets = unpack(message.kept_offsets)
        size = self.pools.block_size
        moves = []
        for r, (sequence, start) in enumerate(zip(unpack(message.sequences), unpack(message.starts), strict=True)):
            index = index_of(int(sequence))
            for i, row in enumerate(kept[offsets[r]:offsets[r + 1]], start=1):
                source, target = int(start) + int(row), int(start) + i
                if source != target:
                    moves += [
                        Move(t, int(table[index, source // size]), source % size,
                             int(table[index, target // size]), target % size)
                        for t, table in enumerate(self.tables)
                    ]
        return moves


__all__ = ["Backend", "Batch", "Executor", "ExecutorOptions", "Handle", "Move", "Output", "Pools"]
