"""Opening a model: the checkpoint behind a path and the family that knows its architecture.

It does not know what families and formats there are: formats tell themselves by the files, families are plugins.
"""

from pathlib import Path
from typing import Any

from antiphon.plugins.models.checkpoint import Checkpoint, CheckpointError
from antiphon.plugins.models.contract import Model
from antiphon.plugins.models.gguf_file import GgufCheckpoint
from antiphon.plugins.models.safetensors_files import SafetensorsCheckpoint
from antiphon.runtime.plugin import find, kinds


def open_checkpoint(path: Path) -> Checkpoint:
    """Open an HF directory or a GGUF file by its header alone. Raises CheckpointError."""
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if path.is_file():
        return GgufCheckpoint(path)
    raise CheckpointError(f"{path} does not exist. Name a catalogue model, an HF model directory or a .gguf file")


def family(checkpoint: Checkpoint) -> str:
    """Name of the installed ``model`` plugin that knows the checkpoint's architecture.

    Raises CheckpointError: none does (names those known), or the config does not tell.
    """
    wanted = checkpoint.config.get("architectures") or []
    if not wanted:
        raise CheckpointError(f"{checkpoint.path}: the config names no 'architectures', so the family is not known")
    known: set[str] = set()
    for name in kinds().get(Model.kind, []):
        cls: type[Model[Any]] = find(Model.kind, name)
        accepts = cls.gguf if isinstance(checkpoint, GgufCheckpoint) else cls.architectures
        if wanted[0] in accepts:
            return name
        known |= accepts
    raise CheckpointError(
        f"{checkpoint.path}: architecture {wanted[0]!r} is not known; known are {', '.join(sorted(known))}. "
        "Install a 'model' plugin for it"
    )
