"""Which sequences of a step begin with the same blocks, so that these need be read only once.

It does not know keys, values or rows.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
FEWEST = 128  # slots: to read fewer once and merge costs what reading them again costs


class Shared(NamedTuple):
    """``members``, two or more, have their first ``blocks`` blocks in common."""

    members: list[int]
    blocks: int


def shared(tables: I32, full: list[int], block_size: int) -> list[Shared]:
    """Group the rows of ``tables`` [R, blocks]; of each only the first ``full`` [R] entries may be shared.

    Neighbours in the order of their tables make a group while they share ``FEWEST`` slots.
    """
    least = -(-FEWEST // block_size)
    able = [r for r, count in enumerate(full) if count >= least]
    if len({int(tables[r, 0]) for r in able}) == len(able):
        return []  # as nearly always
    able.sort(key=lambda r: tables[r].tobytes())
    found: list[Shared] = []
    for before, r in zip([-1, *able], able, strict=False):
        common = _common(tables[before], tables[r], min(full[before], full[r])) if before >= 0 else 0
        if common < least:
            found.append(Shared([r], full[r]))
        else:
            found[-1] = Shared([*found[-1].members, r], min(found[-1].blocks, common))
    return [group for group in found if len(group.members) > 1]


def _common(one: I32, other: I32, most: int) -> int:
    """How many of the first ``most`` entries agree before one does not."""
    differ = np.flatnonzero(one[:most] != other[:most])
    return int(differ[0]) if differ.size else most
