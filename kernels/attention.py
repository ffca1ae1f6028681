"""The attention contract over paged KV, and its reference: plain torch, float32 accumulation, made to be read.

It does not know models, schedulers or how blocks were allocated. A faster path has the same contract and is
compared with this one; what it cannot do it refuses with ``NotSupported``.

**Slots.** Sequence r owns rows ``row_offsets[r]:row_offsets[r + 1]``. ``starts[r]``, the position of its first row,
is the number of slots that were valid before the step. Its local row i wrote its key and value into slot
``starts[r] + i`` before this call. Slot s lies in block ``tables[r, s // block_size]`` at ``s % block_size``. A slot
before ``starts[r]`` is context and its position is s; the slot of an own row has that row's position.

**Latent form** (MLA). Where keys and values are one cached vector, ``kv`` is [1, blocks, block_size, 1, width]: the
key is the whole vector, the value its first ``value_width`` numbers. The caller absorbs its projections into q and out.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class NotSupported(NotImplementedError):
    """This path cannot do what was asked; another one, at least the reference, can."""


@dataclass(frozen=True)
class Causal:
    """A row sees the context and its sequence's rows up to itself."""


@dataclass(frozen=True)
class Window:
    """As ``Causal``, of which it sees positions above its own - ``size``, and the first ``sinks`` positions.

    Longformer's sliding window (Beltagy et al. 2020); with ``sinks`` StreamingLLM (Xiao et al. 2023) without moving
    positions.
    """

    size: int  # tokens, the row's own included
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.size < 1 or self.sinks < 0:
            raise ValueError(f"a window needs size >= 1 and sinks >= 0, found {self.size} and {self.sinks}")


@dataclass(frozen=True, eq=False)
class Tree:
    """A row sees the context and those rows of its sequence that its mask names; positions are depths.

    Bit i of ``ancestors[row]`` is local row i, the own bit is set; 0 (``trees.CAUSAL``) marks a row that sees its
    sequence's rows up to itself. ``window`` narrows this by position. SpecInfer (Miao et al. 2023).
    """

    ancestors: npt.NDArray[np.uint64] | Tensor  # [N]; a tensor is int64 with the same bits
    window: Window | None = None


@dataclass(frozen=True)
class Block:
    """A row sees the context and all rows of its sequence, as block drafters need; ``window`` narrows this."""

    window: Window | None = None


Mask: TypeAlias = Causal | Window | Tree | Block

Decode: TypeAlias = Callable[[Tensor, int], Tensor]
"""``decode(stored, part)``: slots [..., Hkv, any] of keys (part 0) or values (1) as stored -> [..., Hkv, D]."""


class Attended(NamedTuple):
    """Result of N rows.

    ``out`` [N, Hq, value width] in the dtype of q. ``lse`` [N, Hq] float32: natural logarithm of the sum of
    exponentials of all scores read, sinks included; -inf, with ``out`` 0, for a row that reads nothing.
    ``block_mass`` [N, Hq, most] float32, if asked for: attention weight that falls into each entry of the block table;
    it sums to 1 over the last axis, less the weight of a sink.
    """

    out: Tensor
    lse: Tensor
    block_mass: Tensor | None = None


def attention(
    q: Tensor,
    kv: Tensor,
    tables: Tensor,
    row_offsets: Tensor,
    positions: Tensor,
    mask: Mask,
    select: Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    want_mass: bool = False,
    tiled: bool = False,
    value_width: int | None = None,
    decode: Decode | None = None,
) -> Attended:
    """Attend from N rows of R sequences to the KV of one layer.

    - ``q`` [N, Hq, D]; ``kv`` [2, blocks, block_size, Hkv, D], keys then values, or the latent form.
    - ``tables`` int32 [R, most]: block ids, -1 where no block is; ``row_offsets`` int32 [R + 1];
      ``positions`` int32 [N].
    - ``select`` int32 [R, any], padded with -1: the entries of its table that a sequence reads, in any order; others
      are skipped, so a row that should see itself needs its own block selected.
    - ``scale`` of the scores, by default D ** -0.5; then ``softcap`` c > 0 turns a score s into c * tanh(s / c).
    - ``sinks`` [Hq]: logits of one more key per head that has no value (gpt-oss). Of parts to be merged, one gets them.
    - ``decode``: how keys and values are read where they are not stored plainly; what it gives is in the dtype of q.
    - ``tiled``: query head h reads KV head h % Hkv; otherwise h // (Hq // Hkv).

    Raises ValueError for shapes that do not fit and for a visible slot without a block.
    """
    check(q, kv, tables, row_offsets, positions, sinks, value_width, decode)
    exact = torch.promote_types(q.dtype, torch.float32)
    rows, heads, width = q.shape
    block_size, kv_heads, most = kv.shape[2], kv.shape[3], tables.shape[1]
    scale = width**-0.5 if scale is None else scale
    head_of = torch.arange(heads, device=q.device)
    head_of = head_of % kv_heads if tiled else head_of // (heads // kv_heads)

    out = q.new_zeros(rows, heads, width if value_width is None else value_width)
    lse = torch.full((rows, heads), -math.inf, dtype=torch.float32, device=q.device)
    block_mass = torch.zeros(rows, heads, most, dtype=torch.float32, device=q.device) if want_mass else None
    for r, (first, end) in enumerate(zip(row_offsets.tolist()[:-1], row_offsets.tolist()[1:], strict=True)):
        if first == end:
            continue
        slots = int(positions[first]) + end - first
        blocks = -(-slots // block_size)
        if blocks > most:
            raise ValueError(f"sequence {r}: {slots} slots need {blocks} blocks, its table holds {most}")
        seen = visible(mask, positions, first, end)  # [n, T]
        if select is not None:
            chosen = select[r][select[r] >= 0].long()
            if chosen.numel() and int(chosen.max()) >= most:
                raise ValueError(f"sequence {r}: selected block {int(chosen.max())} of a table of {most}")
            named = torch.zeros(most, dtype=torch.bool, device=q.device)
            named[chosen] = True
            seen = seen & named[:blocks].repeat_interleave(block_size)[:slots]
        ids = tables[r, :blocks].long()
        absent = (ids < 0).repeat_interleave(block_size)[:slots]
        if bool((seen & absent).any()):
            raise ValueError(f"sequence {r}: a visible slot lies in a block that its table does not have")
        taken = kv[:, ids.clamp(min=0)].flatten(1, 2)[:, :slots]  # [2 or 1, T, Hkv, D]
        parts = (taken[0], taken[-1]) if decode is None else (decode(taken[0], 0), decode(taken[-1], 1))
        keys = parts[0].to(exact)[:, head_of]
        values = parts[1].to(exact)[:, head_of, : out.shape[2]]

        scores = torch.einsum("nhd,thd->nht", q[first:end].to(exact), keys) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen[:, None, :], -math.inf)
        total = torch.logsumexp(scores, dim=-1)  # [n, Hq]
        if sinks is not None:
            total = torch.logaddexp(total, sinks.to(exact))
        weights = torch.exp(scores - total.masked_fill(total == -math.inf, 0.0)[:, :, None])
        # A stale NaN in a slot that nobody sees must not come through as 0 * NaN.
        values = values.masked_fill(~seen.any(dim=0)[:, None, None], 0.0)
        out[first:end] = torch.einsum("nht,thd->nhd", weights, values).to(q.dtype)
        lse[first:end] = total.float()
        if block_mass is not None:
            padded = torch.nn.functional.pad(weights, (0, blocks * block_size - slots))
            block_mass[first:end, :, :blocks] = padded.view(-1, heads, blocks, block_size).sum(dim=-1).float()
    return Attended(out, lse, block_mass)


def visible(mask: Mask, positions: Tensor, first: int, end: int) -> Tensor:
    """Return which slots each row of one sequence sees, bool [n, T]; its rows are ``first:end``, T = start + n."""
    own = positions[first:end].long()  # [n]
    rows = end - first
    start = int(own[0])
    slots = torch.arange(start + rows, device=positions.device)
    local = slots - start  # negative in the context
    at = torch.arange(rows, device=positions.device)[:, None]
    if isinstance(mask, Block):
        seen = torch.ones(rows, start + rows, dtype=torch.bool, device=positions.device)
    else:
        seen = local <= at
    if isinstance(mask, Tree):
        bits = mask_bits(mask).to(positions.device)[first:end, None]
        named = ((bits >> local.clamp(0, 63)) & 1).bool() & (local < 64)
        seen = torch.where(bits == 0, seen, named | (local < 0))
    window = mask if isinstance(mask, Window) else getattr(mask, "window", None)
    if window is not None:
        key_positions = torch.cat((slots[:start], own))
        near = key_positions > own[:, None] - window.size
        seen = seen & (near | (key_positions < window.sinks))
    return seen


def merge(parts: Sequence[Attended]) -> Attended:
    """Combine what the same rows got from disjoint sets of keys into what they get from all of them.

    Each part counts with exp(its lse - the joint lse): the identity behind flash decoding (Dao et al. 2023) and
    cascade attention. Masses are merged if all parts have them; all parts must then speak of the same block table.
    """
    lses = torch.stack([part.lse for part in parts])  # [P, N, Hq]
    lse = torch.logsumexp(lses, dim=0)
    shares = torch.exp(lses - lse.masked_fill(lse == -math.inf, 0.0))
    out = torch.zeros_like(parts[0].out, dtype=torch.promote_types(parts[0].out.dtype, torch.float32))
    mass: Tensor | None = None
    for part, share in zip(parts, shares, strict=True):
        out += part.out * share[:, :, None]
    masses = [part.block_mass for part in parts if part.block_mass is not None]
    if len(masses) == len(parts):
        mass = (torch.stack(masses) * shares[:, :, :, None]).sum(dim=0)
    return Attended(out.to(parts[0].out.dtype), lse, mass)


def mask_bits(mask: Tree) -> Tensor:
    """Return a tree's masks as int64 [N] with the bits of the uint64: torch shifts no unsigned numbers."""
    if isinstance(mask.ancestors, Tensor):
        return mask.ancestors
    return torch.from_numpy(np.ascontiguousarray(mask.ancestors, np.uint64).view(np.int64))


def check(
    q: Tensor,
    kv: Tensor,
    tables: Tensor,
    row_offsets: Tensor,
    positions: Tensor,
    sinks: Tensor | None,
    value_width: int | None,
    decode: Decode | None = None,
) -> None:
    """Raise ValueError unless the shapes fit the contract."""
    if q.ndim != 3 or kv.ndim != 5 or kv.shape[0] not in {1, 2}:
        shapes = f"{list(q.shape)} and {list(kv.shape)}"
        raise ValueError(f"q must be [N, Hq, D] and kv [2 or 1, blocks, block size, Hkv, D], found {shapes}")
    if (q.shape[2] != kv.shape[4] and decode is None) or q.shape[1] % kv.shape[3]:
        raise ValueError(f"query heads {list(q.shape[1:])} do not fit KV heads {list(kv.shape[3:])}")
    if decode is not None and kv.shape[0] == 1:
        raise ValueError("the latent form has no stored form of its own to decode")
    if (kv.shape[0] == 1) != (value_width is not None):
        raise ValueError("value_width belongs to the latent form, where kv has one part, and only there")
    if value_width is not None and not 0 < value_width <= kv.shape[4]:
        raise ValueError(f"value_width {value_width} of a vector of {kv.shape[4]}")
    if tables.ndim != 2 or len(row_offsets) != len(tables) + 1 or len(positions) != len(q):
        raise ValueError(
            f"{len(tables)} tables, {len(row_offsets)} row offsets, {len(positions)} positions, {len(q)} rows"
        )
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks must be [{q.shape[1]}], found {list(sinks.shape)}")
