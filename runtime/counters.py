"""Counters with fixed names: an unknown name is a mistake of the programmer, not a new metric.

It does not know how counters are shown.
"""

from collections.abc import Iterable


class Counters(dict[str, int]):
    """Names given once; ``add`` raises KeyError for any other."""

    def __init__(self, names: Iterable[str]):
        super().__init__(dict.fromkeys(names, 0))

    def add(self, name: str, amount: int = 1) -> None:
        """Count."""
        self[name] = dict.__getitem__(self, name) + amount


POST = (
    "tells",
    "tells_dropped",
    "asks",
    "asks_failed",
    "asks_timed_out",
    "replies_dropped",
    "frames_in",
    "frames_out",
    "frames_bad",
    "frames_stale",
    "frames_waited",
)
