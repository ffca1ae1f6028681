"""The executor owns the cell's device table and device thread: weights and KV pools.

It does not know requests, text, or why rows are computed.
"""

from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from antiphon.actors.model import Facts, KVGroup
from antiphon.runtime.plugin import O, Plugin

I32 = npt.NDArray[np.int32]
U64 = npt.NDArray[np.uint64]


class Batch(NamedTuple):
    """One step's rows, resolved: no pending ids, block tables looked up. R sequences, N rows, L logit rows.

    Local row i of a sequence writes KV slot ``starts[r] + i`` and sees the slots before ``starts[r]`` and, of
    its own rows, those in its ancestor mask. Without a tree slot and position are equal.
    """

    sequences: I32  # [R] dense indexes
    starts: I32  # [R] KV slots that are valid before this step
    row_offsets: I32  # [R + 1]
    ids: I32  # [N]
    positions: I32  # [N] for RoPE and windows
    ancestors: U64 | None  # [N] bit i = local row i is visible (own bit set); None: plain causal rows
    tables: tuple[I32, ...]  # per block table [R, most blocks], -1 beyond the end; groups name theirs
    logit_rows: I32  # [L] rows whose logits are wanted
    capture: tuple[str, ...] = ()  # hidden states wanted: "input:3", "output:29"


class Output(NamedTuple):
    """What a step computes: ``logits`` [L, vocabulary] float32 (device array), hidden states by name [N, hidden]."""

    logits: Any
    hidden: dict[str, Any]


class Pools(NamedTuple):
    """How KV memory is laid out: groups that keep the whole context share table 0, each window group has its own."""

    block_size: int
    blocks: tuple[int, ...]  # per table
    groups: tuple[tuple[KVGroup, ...], ...]  # per table


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
