"""A backend by itself: steps without actors, so that device time can be told from everything around it.

It does not know how sequences are scheduled or blocks allocated in earnest: all run together, blocks are handed out
in order.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import structlog

from antiphon.actors.executor import Backend, Batch, Pools
from antiphon.actors.model import Facts, KVGroup, ModelSection
from antiphon.runtime.plugin import find


class Bare:
    """A place for plugins outside any cell: it has the ``[model]`` table and builds nested plugins, nothing else."""

    instance = "alone"

    def __init__(self, model: ModelSection):
        self.log = structlog.get_logger()
        self._model = model

    def section(self, name: str) -> Any:
        """The ``[model]`` table. Raises LookupError for another."""
        if name != "model":
            raise LookupError(f"no section {name!r} outside a deployment")
        return self._model

    def service(self, name: str) -> Any:
        """Raises LookupError: there is no cell here."""
        raise LookupError(f"no service {name!r} outside a cell")

    def build(self, kind: str, use: Mapping[str, Any]) -> Any:
        """Make the plugin that ``{plugin = NAME, ...}`` declares. Raises PluginError, msgspec.ValidationError."""
        cls = find(kind, use["plugin"])
        options = {key: value for key, value in use.items() if key != "plugin"}
        return cls(msgspec.convert(options, cls.options_type), self)


class Alone(NamedTuple):
    """Greedy ids by prompt, and the seconds of each ``execute``: of the prefill's chunks, and of the steps after."""

    ids: list[list[int]]
    prefill: list[float]
    steps: list[float]


def pools(facts: Facts, blocks: int, block_size: int = 16) -> Pools:
    """Lay out KV memory as the allocator does: whole-context groups share table 0, each window group has its own."""
    whole = tuple(group for group in facts.groups if not group.window)
    tables: list[tuple[KVGroup, ...]] = [whole] if whole else []
    tables += [(group,) for group in facts.groups if group.window]
    return Pools(block_size, (blocks,) * len(tables), tuple(tables))


def run_alone(backend: Backend[Any], layout: Pools, prompts: Sequence[Sequence[int]], tokens: int, chunk: int) -> Alone:
    """Continue all prompts together by ``tokens`` greedy ids each; ``layout`` is what the backend was loaded with.

    Prompts are computed one after the other in chunks of at most ``chunk`` tokens, then every step has one row a
    prompt. Ends of sequence are ignored. Raises ValueError: the pools are too small, or a prompt is empty.
    """
    if not all(prompts):
        raise ValueError("a prompt is empty")
    each = -(-(max(map(len, prompts)) + tokens) // layout.block_size)
    if each * len(prompts) > min(layout.blocks):
        raise ValueError(f"{len(prompts)} sequences of {each} blocks do not fit {min(layout.blocks)} blocks")
    table = np.arange(len(prompts) * each, dtype=np.int32).reshape(len(prompts), each)

    def execute(sequences: list[int], starts: list[int], rows: list[Sequence[int]]) -> tuple[float, list[int]]:
        offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
        positions = np.concatenate([np.arange(at, at + len(row)) for at, row in zip(starts, rows, strict=True)])
        batch = Batch(
            np.array(sequences, np.int32),
            np.array(starts, np.int32),
            offsets,
            np.concatenate(rows).astype(np.int32),
            positions.astype(np.int32),
            None,
            (table[sequences],) * len(layout.blocks),
            offsets[1:] - 1,
        )
        began = time.perf_counter()
        logits = backend.execute(batch).logits
        seconds = time.perf_counter() - began
        return seconds, [int(id_) for id_ in np.asarray(logits).argmax(axis=1)]

    prefill: list[float] = []
    ids: list[list[int]] = []
    for sequence, prompt in enumerate(prompts):
        for start in range(0, len(prompt), chunk):
            seconds, chosen = execute([sequence], [start], [prompt[start : start + chunk]])
            prefill.append(seconds)
        ids.append(chosen)
    steps: list[float] = []
    for done in range(tokens - 1):
        starts = [len(prompt) + done for prompt in prompts]
        seconds, chosen = execute(list(range(len(prompts))), starts, [row[-1:] for row in ids])
        steps.append(seconds)
        for row, id_ in zip(ids, chosen, strict=True):
            row.append(id_)
    return Alone(ids, prefill, steps)
