"""Trace points: spans of named work, kept in a ring and written as a Chrome trace when asked for.

Off unless ``ANTIPHON_TRACE`` names a directory; a point then costs one tuple. It does not know what is traced.
"""

import json
import os
import time
from collections import deque
from pathlib import Path

_directory = os.environ.get("ANTIPHON_TRACE", "")
enabled = bool(_directory)
_ring: deque[tuple[str, str, float, float]] = deque(maxlen=200_000)
now = time.perf_counter


def point(track: str, name: str, began: float) -> None:
    """Record a span on ``track`` (an actor, the device thread) from ``began`` until now, both in ``now`` seconds."""
    if enabled:
        _ring.append((track, name, began, now()))


def write(cell: str) -> None:
    """Write what the ring holds to ``$ANTIPHON_TRACE/CELL-PID.json`` (chrome://tracing, Perfetto)."""
    if not enabled or not _ring:
        return
    directory = Path(_directory)
    directory.mkdir(parents=True, exist_ok=True)
    events = [
        {"ph": "X", "pid": os.getpid(), "tid": track, "name": name, "ts": began * 1e6, "dur": (ended - began) * 1e6}
        for track, name, began, ended in _ring
    ]
    (directory / f"{cell}-{os.getpid()}.json").write_text(json.dumps({"traceEvents": events}))
