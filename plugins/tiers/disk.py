"""The ``disk`` tier keeps each record in a file of its own, named by its key; the least recently used leave first.

It does not know what records hold, and trusts whoever reads them to check them: a file torn by a power cut is there.

A record is written beside its place and renamed into it, so that a killed process leaves whole records and at most one
file that the next start removes. Nothing is synced: what a power cut takes is computed again. The index is in memory,
read from the directory at the start; a file's time of change is the time of its last use.
"""

import errno
import fcntl
import os
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from antiphon.actors.tier import Record, Tier, TierError, TierFull, TierOptions, Usage
from antiphon.runtime.plugin import Site
from antiphon.runtime.quantities import Bytes

PAGE = 4096  # a file takes whole pages
LOCK = "lock"
WRITING = "writing"  # one thread writes, so one name suffices
_NAME = re.compile(r"[0-9a-f]{64}")


class DiskOptions(TierOptions, frozen=True, kw_only=True):
    """``path`` is a directory, made if it is not there, for one server at a time; ``size`` bounds its files."""

    path: str
    size: Bytes

    def __post_init__(self) -> None:
        if not self.size:
            raise ValueError("size is 0, so nothing could be kept")
        folder = self.folder()
        there = next(p for p in (folder, *folder.parents) if p.exists())
        if not there.is_dir():
            raise ValueError(f"path {self.path!r}: {there} is no directory")
        if not os.access(there, os.W_OK | os.X_OK):
            raise ValueError(f"path {self.path!r}: {there} is not writable for this user")

    def folder(self) -> Path:
        """The path with ``~`` and relative parts resolved."""
        return Path(self.path).expanduser().absolute()


class Disk(Tier[DiskOptions]):
    """A directory of records."""

    def __init__(self, options: DiskOptions, site: Site):
        super().__init__(options, site)
        self.folder = options.folder()
        self.sizes: OrderedDict[bytes, int] = OrderedDict()  # key -> bytes on disk; the least recently used first
        self.bytes = 0
        self._lock: int | None = None

    def open(self) -> None:
        """Make the directory ours and read which records are there."""
        with _told(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for i in range(256):
                (self.folder / f"{i:02x}").mkdir(exist_ok=True, mode=0o700)
            self._seize()
            (self.folder / WRITING).unlink(missing_ok=True)
            found = []
            for i in range(256):
                for entry in os.scandir(self.folder / f"{i:02x}"):
                    if _NAME.fullmatch(entry.name):
                        stat = entry.stat()
                        found.append((stat.st_mtime_ns, bytes.fromhex(entry.name), _on_disk(stat.st_size)))
            self.sizes = OrderedDict((key, size) for _, key, size in sorted(found))
            self.bytes = sum(self.sizes.values())
            self._make_room(0)

    def put(self, records: Sequence[Record]) -> list[tuple[bytes, bytes | None]]:
        """Keep records, in the place of the least recently used ones."""
        gone: list[tuple[bytes, bytes | None]] = []
        for key, record in records:
            size = _on_disk(len(record))
            if size > self.options.size:
                raise TierFull(f"a record of {size} bytes is larger than size, {self.options.size}")
            gone += [(oldest, None) for oldest in self._make_room(size)]
            writing = self.folder / WRITING
            try:
                with _told(self.folder):
                    descriptor = os.open(writing, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                    with os.fdopen(descriptor, "wb", buffering=0) as file:
                        rest = memoryview(record)
                        while rest:
                            rest = rest[file.write(rest) or 0:]
                    writing.replace(self._path(key))
            except TierError:
                with suppress(OSError):
                    writing.unlink(missing_ok=True)
                raise
            self.bytes += size - self.sizes.pop(key, 0)
            self.sizes[key] = size
        return gone

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Records, which are now the most recently used."""
        return [self._get(key) for key in keys]

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether they are there, by the index."""
        return [key in self.sizes for key in keys]

    def drop(self, keys: Sequence[bytes]) -> None:
        """Remove files."""
        with _told(self.folder):
            for key in keys:
                self.bytes -= self.sizes.pop(key, 0)
                self._path(key).unlink(missing_ok=True)

    def usage(self) -> Usage:
        """Whole pages of all files."""
        return Usage(self.bytes, len(self.sizes), self.options.size)

    def close(self) -> None:
        """Let another server have the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _get(self, key: bytes) -> bytes | None:
        if key not in self.sizes:
            return None
        with _told(self.folder):
            try:
                record = self._path(key).read_bytes()
                os.utime(self._path(key))
            except FileNotFoundError:  # somebody removed it
                self.bytes -= self.sizes.pop(key)
                return None
        self.sizes.move_to_end(key)
        return record

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.folder / name[:2] / name

    def _make_room(self, size: int) -> list[bytes]:
        gone = []
        while self.sizes and self.bytes + size > self.options.size:
            gone.append(next(iter(self.sizes)))
            self.drop(gone[-1:])
        return gone

    def _seize(self) -> None:
        """The lock goes with the process, however it ends."""
        if self._lock is None:
            lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as cause:
                os.close(lock)
                raise TierError(f"{self.folder} is in use by another server: give each a path of its own") from cause
            self._lock = lock


def _on_disk(size: int) -> int:
    return -(-size // PAGE) * PAGE


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as cause:
        kind = TierFull if cause.errno in (errno.ENOSPC, errno.EDQUOT) else TierError
        raise kind(f"{folder}: {cause.strerror or cause}") from cause
