"""Attention on a CPU for the plain cases: torch's fused kernel over gathered blocks, contract of ``attention``.

It does not know layers; what one step's rows read is worked out once in a ``Plan`` and used by every layer. Block
selection and block masses it refuses with ``NotSupported``.

Short rows (decoding, verification) of several sequences are padded into one call, because a call costs what reading
some 400 slots costs; a chunk of a prompt gets a call of its own. One sequence whose blocks lie one after another in
the pool is read in place. A beginning that short rows of several sequences share is read once for all of them and
merged with the rest of each (cascade attention; the identity is that of ``attention.merge``). Padding reads slots
that nobody wrote and multiplies them by 0, so **a pool must be allocated with zeros**: NaN, or keys whose scores
overflow, would come through.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from antiphon.kernels.attention import (
    Attended,
    Block,
    Decode,
    Mask,
    NotSupported,
    Tree,
    Window,
    check,
    mask_bits,
    merge,
)
from antiphon.kernels.shared_prefix import shared

I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

SHORT = 16  # rows of a sequence up to which it shares a call
_WASTE = 512  # slots of padding that cost what one more call costs (about 0.1 ms on two cores)
_GATHERED = 2048  # slots copied for one call: more leave the cache, and large buffers are mapped anew each time
_FOLD = 64  # rows times group size up to which bfloat16 folds a group's heads into rows: a product instead of dots
_SEEN = 1 << 23  # numbers of one call's mask, 32 MiB in float32: a long chunk far into a prompt gets several calls
_SCORES = 1 << 24  # float32 scores held at once by the unfused path: 64 MiB


class Call(NamedTuple):
    """One call of the kernel: B sequences of n rows each, shorter ones padded with their last row."""

    shape: tuple[int, int]  # B, n
    rows: Tensor | slice  # [B * n] rows of q
    keep: Tensor | None  # places in [B * n] that are not padding; None: all
    target: Tensor | slice  # rows of the output that those are
    blocks: Tensor | slice  # [B * blocks] block ids, or a run of them
    slots: int  # read of each sequence, at most blocks * block_size
    seen: Tensor | None  # [B, 1, n, slots] additive, 0 or -inf, in the dtype of q; None: see causal
    causal: bool  # without seen: n = slots and row i sees slots 0 to i; otherwise every row sees every slot
    whole: bool = True  # no other call reads slots for these rows
    prefix: bool = False  # the beginning that sequences share; comes after the calls for the rest of their rows


@dataclass(frozen=True)
class Plan:
    """What the rows of one step read from the pools of one block table; valid for every layer that uses it."""

    rows: int
    calls: tuple[Call, ...]


class Part(NamedTuple):
    """A sequence's share of a step."""

    first: int  # row
    rows: int
    start: int  # slots before the step
    entries: I64  # of its table, that it reads, ascending


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
    want_lse: bool = False,
    decode: Decode | None = None,
) -> Attended:
    """Do what ``antiphon.kernels.attention.attention`` does, with its shapes, options and errors.

    ``lse`` comes back only on request (an empty tensor otherwise): the fused kernel does not tell it, and soft-cap,
    sinks and ``want_lse`` take an unfused path, some two times slower. Raises NotSupported for ``select`` and masses.
    """
    if select is not None:
        raise NotSupported("attention on the CPU selects no blocks; use the reference")
    check(q, kv, tables, row_offsets, positions, sinks, value_width, decode)
    made = plan(tables, row_offsets, positions, mask, kv.shape[2], q.dtype)
    return attend(q, kv, made, Options(scale, softcap, sinks, want_mass, tiled, value_width, want_lse, decode))


class Options(NamedTuple):
    """The contract's options that do not change from step to step; see ``attention``."""

    scale: float | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    want_mass: bool = False
    tiled: bool = False
    value_width: int | None = None
    want_lse: bool = False
    decode: Decode | None = None


def plan(
    tables: Tensor | npt.NDArray[np.int32],
    row_offsets: Tensor | npt.NDArray[np.int32],
    positions: Tensor | npt.NDArray[np.int32],
    mask: Mask,
    block_size: int,
    dtype: torch.dtype,
) -> Plan:
    """Work out what the rows of a step read; shapes as in ``attention``, ``dtype`` is that of q.

    Raises ValueError for a visible slot without a block.
    """
    table, offsets, place = np.asarray(tables), np.asarray(row_offsets), np.asarray(positions)
    masks = mask_bits(mask).numpy() if isinstance(mask, Tree) else None
    window = mask if isinstance(mask, Window) else getattr(mask, "window", None)
    short: list[tuple[int, Part]] = []
    calls: list[Call] = []
    prefixes: list[Call] = []
    apart: set[int] = set()  # sequences whose beginning is read by one of the prefixes' calls

    def call(members: list[tuple[int, Part]], whole: bool = True) -> None:
        made = _call(members, table, place, masks, window, isinstance(mask, Block), block_size, dtype)
        calls.append(made._replace(whole=whole))

    for r in range(len(table)):
        first, rows = int(offsets[r]), int(offsets[r + 1] - offsets[r])
        if rows == 0:
            continue
        start = int(place[first])
        part = Part(first, rows, start, _entries(start, rows, window, block_size))
        if part.entries[-1] >= table.shape[1] or table[r, part.entries].min() < 0:
            raise ValueError(f"sequence {r}: a visible slot lies in a block that its table does not have")
        if rows > SHORT:
            # Of a chain, rows before a row are context like any other, so a chunk may be cut anywhere.
            whole = isinstance(mask, Block) or (masks is not None and masks[first : first + rows].any())
            causal = start == 0 and window is None  # needs no mask
            most = rows if whole or causal else max(SHORT, _SEEN // (part.entries.size * block_size))
            for at in range(0, rows, most):
                count = min(most, rows - at)
                call([(r, Part(first + at, count, start + at, _entries(start + at, count, window, block_size)))])
        else:
            short.append((r, part))

    if window is None and len(short) > 1:
        full = [part.start // block_size for _, part in short]
        for places, blocks in shared(table[[r for r, _ in short]], full, block_size):
            members = [short[m] for m in places]
            for m, (r, part) in zip(places, members, strict=True):
                short[m] = (r, part._replace(entries=part.entries[blocks:]))
            prefixes.append(_prefix([part for _, part in members], table[members[0][0], :blocks], block_size))
            apart.update(r for r, _ in members)
    # Like with like: single rows apart from drafts, long contexts first, so that little is padded.
    short.sort(key=lambda member: (member[0] in apart, member[1].rows > 1, -member[1].entries.size))
    group: list[tuple[int, Part]] = []
    waste = 0
    for member in short:
        part = member[1]
        if group:
            slots = group[0][1].entries.size * block_size
            waste += slots - part.entries.size * block_size
            large = (len(group) + 1) * slots > _GATHERED or waste > _WASTE
            like = (group[0][1].rows == 1) == (part.rows == 1) and (group[0][0] in apart) == (member[0] in apart)
            if large or not like:
                call(group, group[0][0] not in apart)
                group, waste = [], 0
        group.append(member)
    if group:
        call(group, group[0][0] not in apart)
    return Plan(int(offsets[-1]), (*calls, *prefixes))


def attend(q: Tensor, kv: Tensor, made: Plan, options: Options = Options()) -> Attended:  # noqa: B008 - immutable
    """Attend in one layer as planned: ``q`` [N, Hq, D], ``kv`` the layer's pool; the plan must be of the same step.

    Raises NotSupported for block masses.
    """
    if options.want_mass:
        raise NotSupported("attention on the CPU tells no block masses; use the reference")
    heads, kv_heads = q.shape[1], kv.shape[3]
    group = heads // kv_heads
    sinks = options.sinks
    if options.tiled:  # head h = e * Hkv + j becomes j * group + e, and back at the end
        q = q.unflatten(1, (group, kv_heads)).transpose(1, 2).flatten(1, 2)  # type: ignore[no-untyped-call]
        sinks = None if sinks is None else sinks.view(group, kv_heads).t().reshape(heads)
    scale = q.shape[2] ** -0.5 if options.scale is None else options.scale
    value_width = q.shape[2] if options.value_width is None else options.value_width
    fused = options.softcap == 0 and sinks is None and not options.want_lse
    out = q.new_empty(made.rows, heads, value_width)
    kept = options.want_lse or not all(call.whole for call in made.calls)
    lse = torch.full((made.rows, heads) if kept else (0, heads), -math.inf)
    for call in made.calls:
        batch, rows = call.shape
        # [B, H, n, D] and [B, Hkv, T, D]: views, the gather of blocks is the only copy
        queries = q[call.rows].view(batch, rows, heads, -1).transpose(1, 2)
        keys = _gather(kv[0], call, batch, options.decode, 0)
        values = _gather(kv[1], call, batch, options.decode, 1) if kv.shape[0] == 2 else keys[..., :value_width]
        if fused and call.whole:
            out[call.target] = _rows(_fused(queries, keys, values, call, scale), call)
            continue
        got, total = _unfused(queries, keys, values, call, scale, options.softcap, None if call.prefix else sinks)
        part = Attended(_rows(got, call), _rows(total[..., None], call)[:, :, 0])
        if call.prefix:  # the rest of these rows is there already
            part = merge([Attended(out[call.target], lse[call.target]), part])
        out[call.target] = part.out
        if kept:
            lse[call.target] = part.lse
    if options.tiled:
        out = out.unflatten(1, (kv_heads, group)).transpose(1, 2).flatten(1, 2)  # type: ignore[no-untyped-call]
        lse = lse.view(-1, kv_heads, group).transpose(1, 2).reshape(-1, heads)
    return Attended(out, lse if options.want_lse else lse[:0])


def _entries(start: int, rows: int, window: Window | None, block_size: int) -> I64:
    """Return the table entries that rows from ``start`` on may read: all, or those of the window and of its sinks."""
    end = -(-(start + rows) // block_size)
    if window is None:
        return np.arange(end)
    near = max(0, start - window.size + 1) // block_size
    head = min(-(-window.sinks // block_size), near)
    return np.concatenate((np.arange(head), np.arange(near, end)))


def _prefix(parts: list[Part], blocks: npt.NDArray[np.int32], block_size: int) -> Call:
    """Lay out one call for all rows of sequences that begin with ``blocks``, all of which every row sees."""
    rows = np.concatenate([np.arange(part.first, part.first + part.rows) for part in parts])
    picked = slice(int(rows[0]), int(rows[-1]) + 1) if _is_run(rows) else torch.from_numpy(rows)
    taken = slice(int(blocks[0]), int(blocks[-1]) + 1) if _is_run(blocks) else torch.from_numpy(blocks.astype(np.int64))
    return Call((1, len(rows)), picked, None, picked, taken, len(blocks) * block_size, None, False, False, True)


def _call(
    members: list[tuple[int, Part]],
    table: npt.NDArray[np.int32],
    place: npt.NDArray[np.int32],
    masks: I64 | None,
    window: Window | None,
    block: bool,
    block_size: int,
    dtype: torch.dtype,
) -> Call:
    """Lay out one call for ``members``, (sequence, part) each."""
    parts = [part for _, part in members]
    if masks is not None and not any(masks[part.first : part.first + part.rows].any() for part in parts):
        masks = None  # a chunk of a prompt beside trees
    batch, rows = len(parts), max(part.rows for part in parts)
    most = max(part.entries.size for part in parts)
    sizes = np.array([part.entries.size for part in parts])[:, None]
    # Padding repeats a sequence's last entry; its slots count as beyond the end.
    ends = np.cumsum(sizes)[:, None]
    entries = np.concatenate([part.entries for part in parts])[ends - sizes + np.minimum(np.arange(most), sizes - 1)]
    taken = np.take_along_axis(table[[r for r, _ in members]], entries, axis=1).astype(np.int64)
    firsts, counts, starts = (np.array(column)[:, None] for column in list(zip(*parts, strict=True))[:3])

    slots = (entries[:, :, None] * block_size + np.arange(block_size)).reshape(batch, -1)  # [B, T]
    exist = np.repeat(np.arange(most) < sizes, block_size, axis=1) & (slots < starts + counts)
    at = np.minimum(np.arange(rows), counts - 1)  # [B, n] local rows
    length = slots.shape[1]
    if batch == 1:  # cut the tail of the last block
        length -= int(-(parts[0].start + rows) % block_size)
        slots, exist = slots[:, :length], exist[:, :length]

    seen: Tensor | None = None
    plain = batch == 1 and masks is None and window is None
    causal = plain and 1 < rows == length and not block
    if not causal and not (plain and rows == 1):
        bools = exist[:, None, :] & _allowed(slots - starts, firsts + at, at, masks, block)
        if window is not None:
            own = place[firsts + at].astype(np.int64)  # [B, n]
            local = np.clip(slots - starts, 0, counts - 1)
            keys = np.where(slots < starts, slots, place[firsts + local])[:, None, :]
            bools &= (keys > own[:, :, None] - window.size) | (keys < window.sinks)
        if not bools.all():
            seen = torch.zeros(bools.shape, dtype=dtype).masked_fill_(torch.from_numpy(~bools), -math.inf)[:, None]

    ordered = (firsts + at).reshape(-1)
    real = (np.arange(rows) < counts).reshape(-1)
    picked = ordered[real]
    return Call(
        shape=(batch, rows),
        rows=slice(int(ordered[0]), int(ordered[-1]) + 1) if _is_run(ordered) else torch.from_numpy(ordered),
        keep=None if real.all() else torch.from_numpy(np.flatnonzero(real)),
        target=slice(int(picked[0]), int(picked[-1]) + 1) if _is_run(picked) else torch.from_numpy(picked),
        blocks=slice(int(taken[0, 0]), int(taken[0, -1]) + 1)
        if batch == 1 and _is_run(taken[0])
        else torch.from_numpy(taken.reshape(-1)),
        slots=length,
        seen=seen,
        causal=causal,
    )


def _allowed(local: I64, rows: I64, at: I64, masks: I64 | None, block: bool) -> Bools:
    """Return what a mask without its window lets see, [B, n, T]: ``local`` [B, T] slots less start, rows [B, n]."""
    key, query = local[:, None, :], at[:, :, None]
    if block:
        return np.ones(np.broadcast_shapes(key.shape, query.shape), np.bool_)
    seen: Bools = key <= query
    if masks is not None:
        bits = masks[rows][:, :, None]
        named = ((bits >> np.clip(key, 0, 63)) & 1 == 1) & (key < 64)
        seen = np.where(bits == 0, seen, named | (key < 0))
    return seen


def _gather(pool: Tensor, call: Call, batch: int, decode: Decode | None, part: int) -> Tensor:
    """Return the slots that a call reads, [B, Hkv, T, D], of a pool of keys or values [blocks, block_size, Hkv, D]."""
    taken = pool[call.blocks] if isinstance(call.blocks, slice) else pool.index_select(0, call.blocks)
    if decode is not None:
        taken = decode(taken, part)
    return taken.view(batch, -1, *taken.shape[2:])[:, : call.slots].transpose(1, 2)


def _rows(values: Tensor, call: Call) -> Tensor:
    """Return [rows that are not padding, Hq, any] of a call's [B, Hq, n, any]."""
    flat = values.transpose(1, 2).reshape(-1, values.shape[1], values.shape[3])
    return flat if call.keep is None else flat[call.keep]


def _fused(queries: Tensor, keys: Tensor, values: Tensor, call: Call, scale: float) -> Tensor:
    batch, heads, rows, width = queries.shape
    group = heads // keys.shape[1]
    seen = call.seen
    if group > 1 and not call.causal and queries.dtype != torch.float32 and rows * group <= _FOLD:
        folded = queries.reshape(batch, keys.shape[1], group * rows, width)
        if seen is not None:
            seen = seen.expand(-1, 1, group, -1) if rows == 1 else seen.repeat(1, 1, group, 1)
        got = functional.scaled_dot_product_attention(folded, keys, values, seen, scale=scale)
        return got.reshape(batch, heads, rows, -1)
    return functional.scaled_dot_product_attention(
        queries, keys, values, seen, is_causal=call.causal, scale=scale, enable_gqa=group > 1
    )


def _unfused(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    call: Call,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return out [B, Hq, n, width] in the dtype of q and lse [B, Hq, n] float32, some rows at a time."""
    batch, heads, rows, width = queries.shape
    kv_heads, slots = keys.shape[1:3]
    keys, values = keys.float().transpose(2, 3), values.float()
    step = max(1, _SCORES // (batch * heads * slots))
    outs, totals = [], []
    for start in range(0, rows, step):
        part = queries[:, :, start : start + step]
        count = part.shape[2]
        folded = part.float().reshape(batch, kv_heads, -1, width)
        scores = (folded @ keys).mul_(scale).view(batch, heads, count, slots)
        if softcap > 0:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        if call.seen is not None:
            scores += call.seen[:, :, start : start + step].float()
        elif call.causal:
            scores.masked_fill_(torch.ones(count, slots, dtype=torch.bool).triu_(start + 1), -math.inf)
        total = torch.logsumexp(scores, dim=-1)
        if sinks is not None:
            total = torch.logaddexp(total, sinks.float()[:, None])
        weights = scores.sub_(total[..., None]).exp_().view(batch, kv_heads, -1, slots)
        outs.append((weights @ values).view(batch, heads, count, -1).to(queries.dtype))
        totals.append(total)
    return torch.cat(outs, dim=2), torch.cat(totals, dim=2)


def _is_run(values: npt.NDArray[np.integer]) -> bool:
    return bool((np.diff(values) == 1).all())
