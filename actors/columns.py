"""Columns: packing of int32 into immutable bytes, and sequence handles.

It does not know what the numbers mean.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
INDEX_BITS = 16  # 65,536 sequences at once
_INDEX = (1 << INDEX_BITS) - 1
_GENERATIONS = 1 << 14


def pack(values: Sequence[int] | Iterable[int] | I32) -> bytes:
    """Values as packed little-endian int32."""
    if isinstance(values, np.ndarray):
        return values.astype("<i4", copy=False).tobytes()
    return np.array(values if isinstance(values, list | tuple) else list(values), dtype="<i4").tobytes()


@lru_cache(maxsize=1024)
def ramp(count: int) -> bytes:
    """0, 1, ... ``count`` - 1 as a column: offsets and row numbers of a step of single rows."""
    return pack(range(count))


def unpack(column: bytes) -> I32:
    """Read-only int32 view of a column. Raises ValueError: not a multiple of four bytes."""
    return np.frombuffer(column, dtype="<i4")


def sequence(index: int, generation: int) -> int:
    """A dense index and its generation in one non-negative int32."""
    return (generation % _GENERATIONS) << INDEX_BITS | index


def index_of(sequence: int) -> int:
    """Dense index of a sequence."""
    return sequence & _INDEX


def indexes(sequences: I32) -> I32:
    """Dense indexes of many sequences."""
    return sequences & np.int32(_INDEX)
