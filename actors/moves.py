"""Moves of blocks as the allocator decides them and as ``Reserved`` carries them.

It does not know why a block moves.
"""

from collections.abc import Iterable
from typing import NamedTuple

from antiphon.actors.columns import pack
from antiphon.actors.index import Evicted
from antiphon.actors.protocol import SAVE


class Move(NamedTuple):
    """COPY: ``block`` onto the block ``place``. SAVE, LOAD: ``key`` says what the block holds, or will."""

    what: int
    table: int
    block: int
    place: int
    key: bytes = b""


def saves(evicted: Iterable[Evicted], block_bytes: int, all_: bool) -> list[Move]:
    """Moves that save what gave way: full blocks which no tier has yet, or ``all_``."""
    return [Move(SAVE, table, block, -1, entry.key) for table, block, entry in evicted
            if (all_ or not entry.stored >> table & 1) and len(entry.ids) == block_bytes]


def columns(moves: Iterable[Move]) -> tuple[bytes, bytes]:
    """Quadruples, and the keys that they number."""
    names: dict[bytes, int] = {}
    column: list[int] = []
    for move in moves:
        place = names.setdefault(move.key, len(names)) if move.key else move.place
        column += (move.what, move.table, move.block, place)
    return pack(column) if column else b"", b"".join(names)
