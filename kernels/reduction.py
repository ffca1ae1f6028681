"""Reduced logits as frames: what leaves the cell when the verifier lives elsewhere.

It does not know who sends the frames.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from antiphon.kernels.sampling import F32, I32, Reduced, Sampling, choose_reduced, reduce

# In the order of Reduced's fields.
_TYPES: tuple[np.dtype[Any], ...] = (np.dtype("<i8"), np.dtype("<f4"), np.dtype("<i4"), np.dtype("?"))


def to_frames(logits: F32, params: Sampling) -> list[Any]:
    """Cut ``logits`` [L, V] to what choosing needs; four contiguous arrays, each a frame."""
    reduced = reduce(logits, params)
    return [np.ascontiguousarray(column, dtype=kind) for column, kind in zip(reduced, _TYPES, strict=True)]


def choose_from_frames(frames: Sequence[Any], params: Sampling) -> I32:
    """The tokens that ``choose`` would have chosen from the full logits, [L]. Raises ValueError: not such frames."""
    if len(frames) != len(_TYPES):
        raise ValueError(f"reduced logits are {len(_TYPES)} frames, not {len(frames)}")
    columns: list[Any] = [np.frombuffer(f, kind) for f, kind in zip(frames, _TYPES, strict=True)]
    return choose_reduced(Reduced(*columns), params)
