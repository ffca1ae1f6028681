"""The torch backend: weights, KV pools and steps of one decoder on the processor.

It does not know requests or text, nor how an architecture or attention is computed: plugins tell.
"""

import mmap
import os
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from antiphon.actors.blocks import U8
from antiphon.actors.columns import I32
from antiphon.actors.executor import Backend, Batch, Move, Output, Pools
from antiphon.actors.model import Dtype, Facts, KVGroup, ModelSection
from antiphon.actors.rows import RowParams
from antiphon.kernels import reduction, sampling, trees
from antiphon.kernels.attention import Causal, Decode, Mask, Tree, Window
from antiphon.plugins.attentions.contract import Attend, Attention
from antiphon.plugins.catalogue.catalogue import CATALOGUE, resolve
from antiphon.plugins.catalogue.errors import CatalogueError
from antiphon.plugins.models.checkpoint import Checkpoint
from antiphon.plugins.models.contract import Model, Shape, group_name
from antiphon.plugins.models.decoder import Decoder, Place, Reach, Read, Step, key_magnitudes
from antiphon.plugins.models.families import family, open_checkpoint
from antiphon.plugins.quantizations.contract import Cast, CastOptions, Quantization
from antiphon.runtime.plugin import Options, Site

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}
# Flags by which Linux tells that a processor multiplies bfloat16 itself: x86 twice, then Arm.
NATIVE_BF16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


class TorchOptions(Options, frozen=True):
    """Options of the torch backend.

    ``threads`` 0 takes every core this process may use (``OMP_NUM_THREADS`` bounds it). ``attention`` names the
    attention plugin with its options. ``pack`` lays weights out for the processor at load, which makes few-row
    steps up to twice as fast; a head tied to its embedding then takes memory twice. ``kv_dtype`` is that of stored
    keys and values, "auto" the compute dtype; ``quantization`` names a plugin that stores them instead.
    """

    threads: int = 0
    attention: dict[str, Any] = msgspec.field(default_factory=lambda: {"plugin": "cpu"})
    pack: bool = True
    kv_dtype: Dtype = "auto"
    quantization: dict[str, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.quantization and self.kv_dtype != "auto":
            raise ValueError("`quantization` decides how keys and values are stored: leave `kv_dtype` out beside it")


class Pool(NamedTuple):
    """KV memory of one group of a block table."""

    table: int
    group: KVGroup
    slots: Tensor  # [layers, 2, blocks, block size, heads, width and scales]

    def records(self) -> U8:
        """The same memory as bytes, [layers * 2, blocks, bytes]: block b is the canonical record at [:, b]."""
        slots = self.slots
        return slots.view(torch.uint8).numpy().reshape(slots.shape[0] * 2, slots.shape[2], -1)


class Torch(Backend[TorchOptions]):
    """Computes steps with torch on the processor, in one dtype."""

    def __init__(self, options: TorchOptions, site: Site):
        super().__init__(options, site)
        self._block_size = 0
        self._pools: dict[str, Pool] = {}
        self._places: list[Place] = []
        self._decoder: Decoder | None = None
        self._attention: Attention[Any] | None = None

    @classmethod
    def problems(cls, sections: Mapping[str, Any]) -> list[tuple[str, str]]:
        """A model path that stands for nothing on this machine and has no name in the catalogue."""
        path = sections["model"].path if "model" in sections else ModelSection().path
        if path in CATALOGUE:
            return []  # fetched at first use
        try:
            resolve(path, fetch=False)
        except CatalogueError as cause:
            return [("model.path", str(cause))]
        return []

    def facts(self) -> Facts:
        """Describe the model from config and header. Raises CheckpointError for files that cannot be served."""
        return self._facts

    def load(self, pools: Pools) -> None:
        """Read the weights in the compute dtype and reserve the pools, whose pages cost nothing until written.

        Raises CheckpointError for damaged weights, ValueError for pools that lack a group of the model.
        """
        torch.set_num_threads(self.options.threads or _cores())
        shape, facts = self._shape, self._facts
        self._attention = self.site.build("attention", self.options.attention)
        self._block_size = pools.block_size
        self._pools = {
            group.name: Pool(table, group, _reserve(group, blocks, pools.block_size))
            for table, (blocks, groups) in enumerate(zip(pools.blocks, pools.groups, strict=True))
            for group in groups
        }
        self._places = []
        for layer in range(shape.layers):
            name = group_name(shape.window(layer))
            if name not in self._pools:
                raise ValueError(f"the pools lack the model's KV group {name!r}; they hold {sorted(self._pools)}")
            before = sum(place.group == name for place in self._places)
            codec = None
            if self._quantization is not None:
                magnitudes = partial(key_magnitudes, shape, self._checkpoint, layer)
                codec = self._quantization.codec(self._pools[name].group, self._dtype, magnitudes)
            self._places.append(Place(name, self._pools[name].slots[before], codec))
        with torch.inference_mode():
            self._decoder = Decoder(shape, self._checkpoint, DTYPES[facts.dtype], pack=self.options.pack)
        del self._checkpoint  # lets go of the mapped files; facts were told from them and are kept

    def execute(self, batch: Batch) -> Output:
        """Write the rows' KV, attend, return float32 logits [L, vocabulary] and the captured hidden states [N, hidden].

        Raises ValueError: a row's slot has no block, or no layer has a captured name.
        """
        assert self._decoder is not None, "load comes first"
        with torch.inference_mode():
            return Output(*self._decoder.run(self.prepare(batch), self._places))

    def prepare(self, batch: Batch) -> Step:
        """Bring a batch to what the layers share: slots to write and attention planned, by group."""
        assert self._attention is not None, "load comes first"
        counts = np.diff(batch.row_offsets)
        owner = np.repeat(np.arange(len(counts)), counts)  # [N]
        slots = batch.starts[owner] + np.arange(len(owner)) - batch.row_offsets[owner]  # [N]
        ancestors = None
        if batch.parents is not None and not trees.is_chain(batch.row_offsets, batch.parents):
            ancestors = trees.ancestors_of_columns(batch.row_offsets, batch.parents)
        offsets, positions = _tensor(batch.row_offsets), _tensor(batch.positions)
        reaches: dict[str, Reach] = {}
        for name in {place.group for place in self._places}:
            pool = self._pools[name]
            table = batch.tables[pool.table]
            entry = slots // self._block_size
            if len(entry) and (int(entry.max()) >= table.shape[1] or int(table[owner, entry].min()) < 0):
                raise ValueError(
                    f"a row's slot has no block in table {pool.table}: {int(slots.max()) + 1} slots wanted"
                )
            places = table[owner, entry].astype(np.int64) * self._block_size + slots % self._block_size
            plan = self._attention.plan(
                _tensor(table), offsets, positions, _mask(pool.group.window, ancestors), self._block_size, self._dtype
            )
            reaches[name] = Reach(torch.from_numpy(places), _out(plan))
        logit_rows = _tensor(batch.logit_rows).long()
        return Step(_tensor(batch.ids), positions, logit_rows, reaches, batch.capture)

    def move(self, moves: list[Move]) -> None:
        """Copy slots as if one after the other, in every group of their table."""
        with torch.inference_mode():
            for table in {move.table for move in moves}:
                flats = [pool.slots.flatten(2, 3).flatten(0, 1) for pool in self._pools.values() if pool.table == table]
                for sources, targets in _runs([m for m in moves if m.table == table], self._block_size):
                    for flat in flats:  # [layers * 2, slots, heads, width]
                        flat.index_copy_(1, targets, flat.index_select(1, sources))

    def read(self, table: int, blocks: I32) -> list[U8]:
        """Copies of blocks of a table, per group in the order of the pools."""
        found = []
        for records in self._records(table):
            out = np.empty((len(blocks), records.shape[0], records.shape[2]), np.uint8)
            for place, block in zip(out, blocks.tolist(), strict=True):
                place[:] = records[:, block]
            found.append(out.reshape(len(blocks), records.shape[0] * records.shape[2]))
        return found

    def write(self, table: int, blocks: I32, data: "list[U8 | None]") -> None:
        """Write what ``read`` gave."""
        for records, given in zip(self._records(table), data, strict=True):
            if given is not None:
                for block, record in zip(blocks.tolist(), given, strict=True):
                    records[:, block] = record.reshape(records.shape[0], records.shape[2])

    def copy(self, table: int, sources: I32, targets: I32) -> None:
        """Copy blocks in order."""
        for records in self._records(table):
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                records[:, target] = records[:, source]

    def _records(self, table: int) -> list[U8]:
        return [pool.records() for pool in self._pools.values() if pool.table == table]

    def reduce(self, logits: Any, params: RowParams) -> list[Any]:
        """Cut logits to what a verifier in another cell needs, as ``kernels.reduction`` packs it."""
        rows = sampling.sampling(len(params.position), **params._asdict())
        return list(reduction.to_frames(logits.numpy(), rows))

    @cached_property
    def _section(self) -> ModelSection:
        section: ModelSection = self.site.section("model")
        return section

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        return open_checkpoint(resolve(self._section.path))

    @cached_property
    def _shape(self) -> Shape:
        model: Model[Any] = self.site.build("model", {"plugin": family(self._checkpoint)})
        return model.shape(self._checkpoint.config)

    @cached_property
    def _dtype(self) -> torch.dtype:
        return DTYPES[self._compute]

    @cached_property
    def _quantization(self) -> Quantization[Any] | None:
        """How keys and values are stored; None: plainly, in the compute dtype."""
        options = self.options
        if options.quantization:
            made: Quantization[Any] = self.site.build("quantization", options.quantization)
            return made
        if options.kv_dtype in {"auto", self._compute}:
            return None
        return Cast(CastOptions(dtype=options.kv_dtype), self.site)

    @cached_property
    def _compute(self) -> str:
        wanted = self._section.dtype
        return wanted if wanted != "auto" else "bfloat16" if native_bfloat16() else "float32"

    @cached_property
    def _facts(self) -> Facts:
        shape, dtype = self._shape, self._compute
        groups = shape.groups(dtype)
        if self._quantization is not None:
            groups = tuple(self._quantization.stored(group) for group in groups)
        return Facts(
            name=self._checkpoint.name,
            vocabulary=shape.vocabulary,
            context=shape.context,
            layers=shape.layers,
            hidden=shape.hidden,
            groups=groups,
            eos=shape.eos,
            dtype=dtype,
            digest=self._checkpoint.digest(),
        )


def native_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Say whether the processor multiplies bfloat16 itself; False where Linux does not tell."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return not NATIVE_BF16.isdisjoint(flags.split())


def _cores() -> int:
    """Cores this process may use, or fewer if ``OMP_NUM_THREADS`` says so."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(wanted)) if wanted.isdecimal() and int(wanted) else cores


def _reserve(group: KVGroup, blocks: int, block_size: int) -> Tensor:
    """Zeros that take memory as they are written: anonymous pages, which attention may read before (0, never NaN)."""
    dtype = DTYPES[group.dtype]
    shape = (group.layers, 2, blocks, block_size, group.heads, group.width + group.scale_bytes // dtype.itemsize)
    pages = mmap.mmap(-1, max(1, blocks * block_size * group.slot_bytes()))
    return torch.frombuffer(pages, dtype=dtype, count=int(np.prod(shape))).view(shape)


def _mask(window: int, ancestors: npt.NDArray[np.uint64] | None) -> Mask:
    narrow = Window(window) if window else None
    return narrow or Causal() if ancestors is None else Tree(ancestors, narrow)


def _out(attend: Attend) -> Read:
    def read(q: Tensor, kv: Tensor, decode: Decode | None) -> Tensor:
        # A path that reads plain pools need not know the option.
        return attend(q, kv).out if decode is None else attend(q, kv, decode=decode).out

    return read


def _tensor(column: npt.NDArray[Any]) -> Tensor:
    """View of a column; a read-only one (it came in a message) is copied, as torch knows no such tensors."""
    return torch.from_numpy(column if column.flags.writeable else column.copy())


def _runs(moves: list[Move], block_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Split moves of one table into runs that may be made at once: none reads or writes what an earlier one wrote."""
    sources: list[int] = []
    targets: list[int] = []
    for move in moves:
        source = move.from_block * block_size + move.from_slot
        target = move.to_block * block_size + move.to_slot
        if source in targets or target in targets:
            yield torch.tensor(sources), torch.tensor(targets)
            sources, targets = [], []
        sources.append(source)
        targets.append(target)
    if sources:
        yield torch.tensor(sources), torch.tensor(targets)
