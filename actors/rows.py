"""Sampling parameters of sequences, kept as arrays so that a step's rows are looked up and not looped over.

It does not know how they are applied.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from antiphon.actors.columns import I32
from antiphon.actors.protocol import Open


class RowParams(NamedTuple):
    """Parameters of L logit rows. ``position`` is the absolute position of the token that the row predicts."""

    temperature: npt.NDArray[np.float32]  # [L] 0: greedy
    top_k: I32  # [L] 0: off
    top_p: npt.NDArray[np.float64]  # [L] 1: off
    seed: npt.NDArray[np.uint64]  # [L]
    sample: I32  # [L]
    position: I32  # [L]


class SequenceParams:
    """Sampling parameters by dense sequence index."""

    def __init__(self) -> None:
        self._temperature = np.zeros(64, np.float32)
        self._top_k = np.zeros(64, np.int32)
        self._top_p = np.ones(64, np.float64)
        self._seed = np.zeros(64, np.uint64)
        self._sample = np.zeros(64, np.int32)

    def open(self, index: int, message: Open) -> None:
        """Note an opened sequence's parameters."""
        self._grow(index)
        sampling = message.sampling
        self._temperature[index] = sampling.temperature
        self._top_k[index] = sampling.top_k
        self._top_p[index] = sampling.top_p
        self._seed[index] = message.seed
        self._sample[index] = message.sample

    def fork(self, index: int, source: int, sample: int) -> None:
        """A fork samples as its source does, with a sample index of its own."""
        self._grow(index)
        for column in (self._temperature, self._top_k, self._top_p, self._seed):
            column[index] = column[source]
        self._sample[index] = sample

    def rows(self, indexes: I32, positions: I32) -> RowParams:
        """Parameters of rows that belong to the sequences ``indexes`` [L]."""
        return RowParams(self._temperature[indexes], self._top_k[indexes], self._top_p[indexes],
                         self._seed[indexes], self._sample[indexes], positions)

    def _grow(self, index: int) -> None:
        while index >= len(self._temperature):
            for name in ("_temperature", "_top_k", "_top_p", "_seed", "_sample"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros_like(column)]))


NO_ROWS = SequenceParams().rows(np.zeros(0, np.int32), np.zeros(0, np.int32))
