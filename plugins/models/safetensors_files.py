"""HF model directories: ``config.json`` beside one or several safetensors files.

It does not know what a family makes of config and tensors.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from antiphon.plugins.models.checkpoint import SAMPLED_BYTES, Checkpoint, CheckpointError, Entry, normal

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


class SafetensorsCheckpoint(Checkpoint):
    """A directory as HF writes it; files stay mapped, tensors are converted as they are read."""

    def __init__(self, path: Path):
        """Read config and headers. Raises CheckpointError: no model directory, files missing or damaged."""
        self.path = path
        self.name = path.name
        config = _json(path / "config.json", "it is no HF model directory")
        if config.get("quantization_config"):
            method = config["quantization_config"].get("quant_method", "unnamed")
            raise CheckpointError(
                f"{path} holds weights quantized by the method {method!r}, which is not read here. "
                "Take the unquantized checkpoint or a GGUF file"
            )
        generation = path / "generation_config.json"
        self.config = normal(config, _json(generation) if generation.is_file() else None)
        self._files: dict[str, Any] = {}
        self._home: dict[str, str] = {}
        self.index = self._open()

    def read(self, name: str, out: torch.Tensor) -> None:
        """Convert a stored tensor into ``out``, straight from the mapped file."""
        self.require(name, tuple(out.shape))
        out.copy_(self._files[self._home[name]].get_tensor(name))

    def sample(self, name: str) -> bytes:
        """Rows from the middle of a tensor, about SAMPLED_BYTES of them."""
        shape = self.index[name].shape
        part = self._files[self._home[name]]
        if not shape or 0 in shape:
            tensor: torch.Tensor = part.get_tensor(name)
        else:
            row = 4 * torch.Size(shape[1:]).numel()
            first = shape[0] // 2
            tensor = part.get_slice(name)[first : first + max(1, SAMPLED_BYTES // row)]
        return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()

    def _open(self) -> dict[str, Entry]:
        promised = self._promised()
        index: dict[str, Entry] = {}
        for file in sorted(set(promised.values())) if promised else [SINGLE]:
            part = self._files[file] = _part(self.path / file)
            for name in part.keys():  # noqa: SIM118 - a safetensors handle does not iterate
                piece = part.get_slice(name)
                index[name] = Entry(tuple(piece.get_shape()), piece.get_dtype())
                self._home[name] = file
        for name, file in promised.items():
            if self._home.get(name) != file:
                raise CheckpointError(
                    f"{self.path / file} lacks tensor {name!r}, which {INDEX} promises. Fetch it again"
                )
        for name, entry in index.items():
            if entry.stored not in FLOATS:
                raise CheckpointError(
                    f"{self.path}: tensor {name!r} is stored as {entry.stored}, which is not read here "
                    f"(supported: {', '.join(sorted(FLOATS))}). Take an unquantized checkpoint or a GGUF file"
                )
        return index

    def _promised(self) -> dict[str, str]:
        """Tensor name to file name by the index of a sharded checkpoint; empty for a single file."""
        if (self.path / SINGLE).is_file():
            return {}
        if not (self.path / INDEX).is_file():
            pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in self.path.glob(pattern))
            found = f" (only {', '.join(pickled[:3])}: pickled files are not read, convert them)" if pickled else ""
            raise CheckpointError(f"{self.path} has neither {SINGLE} nor {INDEX}{found}")
        listing = _json(self.path / INDEX)
        promised = listing.get("weight_map")
        if not isinstance(promised, dict) or not promised:
            raise CheckpointError(f"{self.path / INDEX} has no 'weight_map'. Fetch it again")
        for name, file in promised.items():
            if not isinstance(file, str) or Path(file).name != file:  # a path could lead out of the directory
                raise CheckpointError(
                    f"{self.path / INDEX}: tensor {name!r} lies in {file!r}, which is no plain file name"
                )
        return promised


def _part(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, though the index names it. Fetch the model again")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as cause:
        size = path.stat().st_size
        raise CheckpointError(
            f"{path} ({size} bytes) is truncated or no safetensors file: {cause}. Fetch it again"
        ) from cause


def _json(path: Path, otherwise: str = "") -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path.parent} has no {path.name}: {otherwise or 'fetch the model again'}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as cause:
        raise CheckpointError(f"{path} is no valid JSON: {cause}. Fetch it again") from cause
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no JSON object. Fetch it again")
    return found
