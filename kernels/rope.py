"""Rotary position embedding in the half-split layout: frequencies and their scaling, tables, rotation.

It does not know models: a family says which width and parameters it uses.

Half-split ("neox"): element i of a head is rotated with element i + width / 2; checkpoints in the Hugging Face layout
are permuted to it. Su et al. 2021.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

KINDS = ("default", "linear", "llama3")


def frequencies(width: int, theta: float, scaling: Mapping[str, Any] | None = None) -> Tensor:
    """Return the angle per position of each pair, float32 [width / 2].

    ``width`` is how many elements of a head are rotated. ``scaling`` is a config's ``rope_scaling`` or
    ``rope_parameters`` (kind under ``rope_type`` or ``type``; none means "default"):

    - "linear": positions count 1 / ``factor`` (Chen et al. 2023).
    - "llama3": wave lengths above ``original_max_position_embeddings`` / ``low_freq_factor`` are stretched by
      ``factor``, those below it / ``high_freq_factor`` are kept, those between are blended (Llama 3.1, 2024).

    Raises ValueError for a kind not in KINDS, a parameter that is missing, or an odd width.
    """
    if width % 2:
        raise ValueError(f"rotary width must be even, found {width}")
    given: Mapping[str, Any] = scaling or {}
    kind = given.get("rope_type") or given.get("type") or "default"
    inverse = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width)
    if kind == "default":
        return inverse
    if kind == "linear":
        return inverse / _number(given, "factor", kind)
    if kind == "llama3":
        return _llama3(inverse, given)
    raise ValueError(f"rope scaling {kind!r} is not one of {', '.join(KINDS)}")


def tables(positions: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, float32 [N, width / 2], of ``positions`` [N] with ``inverse`` from ``frequencies``."""
    angles = positions.float()[:, None] * inverse
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return ``x`` [N, heads, D] with its first ``width`` elements rotated, in the dtype of x.

    ``cosines`` and ``sines`` are [N, width / 2] from ``tables``; elements from ``width`` on stay. Computed in float32.
    """
    half = cosines.shape[1]
    cosines, sines = cosines[:, None], sines[:, None]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    out = torch.empty_like(x)
    out[..., :half] = first * cosines - second * sines
    out[..., half : 2 * half] = second * cosines + first * sines
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out


def _llama3(inverse: Tensor, given: Mapping[str, Any]) -> Tensor:
    factor = _number(given, "factor", "llama3")
    low = _number(given, "low_freq_factor", "llama3")
    high = _number(given, "high_freq_factor", "llama3")
    context = _number(given, "original_max_position_embeddings", "llama3")
    if not high > low:
        raise ValueError(f"rope scaling 'llama3' needs high_freq_factor above low_freq_factor, found {high} and {low}")
    waves = 2 * math.pi / inverse  # wave lengths in positions
    smooth = ((context / waves - low) / (high - low)).clamp(0.0, 1.0)  # 0: stretched, 1: kept
    return (1 - smooth) * inverse / factor + smooth * inverse


def _number(given: Mapping[str, Any], name: str, kind: str) -> float:
    value = given.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"rope scaling {kind!r} needs {name} above 0, found {value!r}")
    return float(value)
