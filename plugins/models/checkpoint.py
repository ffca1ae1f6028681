"""Checkpoints: one reading interface over a model's files, whatever their format.

It does not know any format, nor what a family makes of the tensors.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

SAMPLED_TENSORS = 1024
SAMPLED_BYTES = 4096


class CheckpointError(Exception):
    """Seen by the operator before serving starts: a model file is missing, damaged or of a sort we do not read."""


class Entry(NamedTuple):
    """A tensor as the checkpoint's index states it: shape outermost first, storage type as the format names it."""

    shape: tuple[int, ...]
    stored: str


class Checkpoint(ABC):
    """A model's configuration and tensors, read lazily from mapped files.

    ``config`` is in the normal form of an HF ``config.json`` whatever the format: ``architectures`` (HF class names
    or GGUF's ``general.architecture``), ``rope_parameters`` with ``rope_theta`` and ``rope_type``, ``eos_token_id``
    as a list. Tensors bear HF names. ``config`` and ``index`` come from headers alone.
    """

    path: Path
    name: str
    config: Mapping[str, Any]
    index: Mapping[str, Entry]

    @abstractmethod
    def read(self, name: str, out: torch.Tensor) -> None:
        """Convert a stored tensor into ``out`` (its shape, any float dtype); no whole second copy is made."""

    @abstractmethod
    def sample(self, name: str) -> bytes:
        """Bytes from the middle of a tensor as stored, at most about SAMPLED_BYTES."""

    def tensor(self, name: str, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """Read a tensor into memory of its own. Raises CheckpointError: missing, or not of ``shape``."""
        out = torch.empty(self.require(name, shape).shape, dtype=dtype)
        self.read(name, out)
        return out

    def require(self, name: str, shape: tuple[int, ...] | None = None) -> Entry:
        """Index entry of a tensor. Raises CheckpointError: missing, or not of ``shape``."""
        entry = self.index.get(name)
        if entry is None:
            raise CheckpointError(
                f"{self.path} has no tensor {name!r}, which its config promises: the files are incomplete or belong to "
                "another config. Fetch the model again"
            )
        if shape is not None and entry.shape != shape:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has shape {list(entry.shape)}, its config calls for {list(shape)}: "
                "config and weights are not of the same model"
            )
        return entry

    def digest(self) -> str:
        """SHA-256 of config, tensor index and sampled bytes, in hex.

        Quick at any size: of at most SAMPLED_TENSORS tensors, spread evenly, one page from the middle is read. So
        it tells checkpoints apart that were trained apart; a change of single values elsewhere escapes it.
        """
        digest = hashlib.sha256(b"antiphon.checkpoint.1")
        names = sorted(self.index)
        index = [(name, self.index[name].shape, self.index[name].stored) for name in names]
        for part in (dict(self.config), index):
            encoded = msgspec.json.encode(part, order="deterministic")
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        step = max(1, -(-len(names) // SAMPLED_TENSORS))
        for name in names[::step]:
            digest.update(self.sample(name))
        return digest.hexdigest()


def normal(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Bring an HF config to the normal form; ``generation`` (generation_config.json) may name more ends.

    Older configs keep ``rope_theta`` beside ``rope_scaling``, and call the latter's ``rope_type`` ``type``.
    """
    found = dict(config)
    rope = dict(found.pop("rope_parameters", None) or {})
    scaling = dict(found.pop("rope_scaling", None) or {})
    if "type" in scaling:
        scaling.setdefault("rope_type", scaling.pop("type"))
    rope = {**scaling, **rope}
    theta = found.pop("rope_theta", None)
    rope.setdefault("rope_theta", 10000.0 if theta is None else theta)
    rope.setdefault("rope_type", "default")
    partial = found.pop("partial_rotary_factor", None)
    if partial is not None:
        rope.setdefault("partial_rotary_factor", partial)
    ends: list[int] = []
    for value in (found.get("eos_token_id"), (generation or {}).get("eos_token_id")):
        ends += [value] if isinstance(value, int) else list(value or ())
    return {**found, "rope_parameters": rope, "eos_token_id": sorted(set(ends))}
