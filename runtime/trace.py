"""Trace points: spans of named work, kept in a ring and written as a Chrome trace when asked for.

Off unless ``ANTIPHON_TRACE`` names a directory; a point then costs one look. It does not know what is traced.
"""

import json
import os
import time
from collections import deque
from pathlib import Path

POINTS = 200_000  # spans kept, about 20 MB

enabled = False
now = time.perf_counter  # on Linux the same clock in every process: traces of several cells line up
_directory = Path()
_ring: deque[tuple[str, str, float, float]] = deque(maxlen=POINTS)


def begin(directory: str) -> None:
    """Record from now on, for ``write`` into ``directory``; an empty name ends recording."""
    global enabled, _directory
    enabled, _directory = bool(directory), Path(directory)
    _ring.clear()


def point(track: str, name: str, began: float) -> None:
    """Record a span on ``track`` (an actor, the device thread) from ``began`` until now, both in ``now`` seconds."""
    if enabled:
        _ring.append((track, name, began, now()))


def write(cell: str) -> Path | None:
    """Write what the ring holds to ``$ANTIPHON_TRACE/CELL-PID.json`` (chrome://tracing, Perfetto); its path.

    A trace that cannot be written is given up: it must not keep a cell from stopping.
    """
    if not enabled or not _ring:
        return None
    spans, pid = tuple(_ring), os.getpid()
    tracks = {track: number for number, track in enumerate(dict.fromkeys(span[0] for span in spans), start=1)}
    events: list[dict[str, object]] = [{"ph": "M", "pid": pid, "name": "process_name", "args": {"name": cell}}]
    events += ({"ph": "M", "pid": pid, "tid": number, "name": "thread_name", "args": {"name": track}}
               for track, number in tracks.items())
    events += ({"ph": "X", "pid": pid, "tid": tracks[track], "name": name,
                "ts": began * 1e6, "dur": (ended - began) * 1e6} for track, name, began, ended in spans)
    path = _directory / f"{cell}-{pid}.json"
    try:
        _directory.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"traceEvents": events}))
    except OSError:
        return None
    return path


begin(os.environ.get("ANTIPHON_TRACE", ""))
