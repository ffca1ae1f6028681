"""Durations and sizes as people write them: "250ms", "60s", "4GiB".

It does not know which option holds one; a field says so by its type, ``Seconds`` or ``Bytes``.
"""

import re
from typing import Annotated

import msgspec

DURATION = "duration"
SIZE = "size"

Seconds = Annotated[float, msgspec.Meta(ge=0, extra={"quantity": DURATION})]
"""Type of an option that a config writes as a duration; the option itself is a number of seconds."""

Bytes = Annotated[int, msgspec.Meta(ge=0, extra={"quantity": SIZE})]
"""Type of an option that a config writes as a size or a number of bytes; the option itself is bytes."""

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES = {"B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _BYTES |= {f"{_letter}B": 1000**_power, f"{_letter}iB": 1024**_power}
_WRITTEN = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)")


def duration(text: str) -> float:
    """Seconds that ``text`` says. Raises ValueError: no number with one of the units us, ms, s, m, h."""
    number, unit = _split(text, "duration", _SECONDS)
    return number * _SECONDS[unit]


def size(text: str) -> int:
    """Bytes that ``text`` says. Raises ValueError: no number with a unit B, KB.. (1000), KiB.. (1024), or not whole."""
    number, unit = _split(text, "size", _BYTES)
    found = number * _BYTES[unit]
    if found != int(found):
        raise ValueError(f"{text!r} is no whole number of bytes")
    return int(found)


def _split(text: str, what: str, units: dict[str, float] | dict[str, int]) -> tuple[float, str]:
    found = _WRITTEN.fullmatch(text.strip())
    if found is None or found[2] not in units:
        raise ValueError(f"{text!r} is no {what}: write a number and one of {', '.join(units)}")
    return float(found[1]), found[2]
