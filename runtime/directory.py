"""The directory of a deployment's sockets: mode 0700, locked while its root lives, removed when nobody holds it.

It does not know which sockets lie in it.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from antiphon.runtime.errors import CellFailed

LONGEST = 107  # bytes of a Unix socket's path
LOCK = "lock"
GRACE = 60.0  # seconds a directory may stand without its lock before it counts as dead


class Directory:
    """A fresh directory with room for socket names of ``longest`` bytes; those of dead deployments are swept first."""

    def __init__(self, longest: int):
        self.path = _make(longest)
        # The lock, not the process id in the name, says that we live: ids are reused, and unknown in other containers.
        # It is held before it has its name, so that no sweep ever finds it free.
        draft = Path(self.path) / f"{LOCK}.draft"
        self._lock = os.open(draft, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        draft.rename(Path(self.path) / LOCK)

    def close(self) -> None:
        """Remove the directory and all in it; idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def homes() -> list[Path]:
    """Where such directories may stand, the preferred one first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    found = [Path(p) for p in (runtime, tempfile.gettempdir(), "/tmp") if p]  # noqa: S108 - mkdtemp makes it ours
    return [p for p in dict.fromkeys(found) if p.is_dir() and os.access(p, os.W_OK | os.X_OK)]


def sweep(home: Path) -> list[Path]:
    """Remove the directories of dead deployments of this user; the paths removed."""
    removed = []
    for old in home.glob(f"antiphon-{os.getuid()}-*"):
        if _dead(old):
            shutil.rmtree(old, ignore_errors=True)
            removed.append(old)
    return removed


def remove(files: Iterable[str]) -> None:
    """Unlink what is there."""
    for path in list(files):
        Path(path).unlink(missing_ok=True)


def _make(longest: int) -> str:
    tried = []
    for home in homes():
        sweep(home)
        prefix = f"antiphon-{os.getuid()}-{os.getpid()}-"
        if len(os.fsencode(home)) + 1 + len(prefix) + 8 + 1 + longest <= LONGEST:  # mkdtemp appends 8 characters
            return tempfile.mkdtemp(prefix=prefix, dir=home)
        tried.append(str(home))
    raise CellFailed(f"no directory for sockets: {', '.join(tried) or 'none'} cannot be written or has too long a "
                     f"path (a socket's path has at most {LONGEST} bytes); set XDG_RUNTIME_DIR to a short one")


def _dead(directory: Path) -> bool:
    try:
        lock = os.open(directory / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        try:
            return time.time() - directory.stat().st_mtime > GRACE
        except OSError:
            return False
    except OSError:
        return False  # another's, or on its way out
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(lock)
