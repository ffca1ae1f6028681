"""Turns what a caller's program says into the wire's messages, or refuses it before it travels.

It does not know connections or answers.
"""

import secrets
import struct
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from antiphon.plugins.doors import wire
from antiphon.plugins.doors.errors import Refused

T = TypeVar("T")
Prompt = str | Sequence[int]


def given(prompt: Prompt) -> dict[str, Any]:
    """The field ``text`` or ``ids`` of a prompt. Raises Refused."""
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as cause:
            raise Refused("invalid", f"the prompt is no valid Unicode text: {cause}") from None
        return {"text": prompt}
    try:
        return {"ids": wire.pack(prompt)}
    except (struct.error, TypeError, OverflowError) as cause:
        raise Refused("invalid", f"token ids must be a sequence of 32-bit integers: {cause}") from None


def generation(prompt: Prompt, options: Mapping[str, Any]) -> wire.Generate:
    """The request for an answer. Raises Refused for a value, TypeError for an option that does not exist."""
    fields = {**given(prompt), **options}
    if "stop_ids" in options:
        fields["stop_ids"] = tuple(options["stop_ids"])
    unknown = options.keys() - set(wire.Generate.__struct_fields__) | options.keys() & {"id", "text", "ids"}
    if unknown:
        known = [f for f in wire.Generate.__struct_fields__ if f not in ("id", "text", "ids")]
        raise TypeError(f"unknown option {', '.join(sorted(unknown))}; options are {', '.join(known)}")
    made = _made({"id": secrets.token_bytes(16), **fields}, wire.Generate)
    if made.seed is not None and not 0 <= made.seed < 1 << 64:
        raise Refused("invalid", f"seed is {made.seed}; it must lie in 0..2**64 - 1")
    return made


def pinning(prompt: Prompt, seconds: float, raw: bool) -> wire.Pin:
    """The request to keep a prefix. Raises Refused."""
    return _made({"id": secrets.token_bytes(8), **given(prompt), "seconds": seconds, "raw": raw}, wire.Pin)


def _made(fields: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as cause:
        raise Refused("invalid", str(cause)) from None
