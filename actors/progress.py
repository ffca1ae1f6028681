"""How far sequences are: valid slots and the ids that are not yet in a keyed block, as arrays over dense indexes.

It does not know blocks. ``commit`` runs in each step for every sequence, so it has no loop over them.
"""

import numpy as np

from antiphon.actors.columns import index_of, indexes, pack, ramp, unpack
from antiphon.actors.protocol import Commit

NEVER = np.iinfo(np.int32).max
MOST_COMMITTED = 66  # ids of one step: 63 drafts, the token after them, one that was promised; and one to spare


class Progress:
    """Rows of arrays by ``index_of``; ``handles`` tells an old generation from the present one."""

    def __init__(self, block_size: int):
        self.size = block_size
        self.width = 1 << (block_size + MOST_COMMITTED - 1).bit_length()  # of the ring of ids
        self.handles = np.full(64, -1, dtype=np.int32)
        self.lengths = np.zeros(64, dtype=np.int32)  # KV slots valid
        self.known = np.zeros(64, dtype=np.int32)  # ids known, from the first
        self.due = np.full(64, NEVER, dtype=np.int32)  # length at which somebody has to look
        self.ring = np.zeros((64, self.width), dtype=np.int32)  # the id at position p lies at p modulo the width

    def open(self, sequence: int, length: int, ids: bytes = b"", total: int = 0) -> None:
        """Begin a row with ``total`` ids, of which ``ids`` are the last, at most a block's worth."""
        index = index_of(sequence)
        while index >= len(self.handles):
            for name in ("handles", "lengths", "known", "due", "ring"):
                array = getattr(self, name)
                setattr(self, name, np.concatenate([array, np.full_like(array, -1)]))
        self.handles[index], self.lengths[index], self.known[index], self.due[index] = sequence, length, total, NEVER
        last = unpack(ids)
        self.ring[index, np.arange(total - len(last), total) % self.width] = last

    def close(self, sequence: int) -> None:
        """End a row."""
        if self.handles[index_of(sequence)] == sequence:
            self.handles[index_of(sequence)] = -1

    def length(self, sequence: int) -> int:
        """KV slots valid."""
        return int(self.lengths[index_of(sequence)])

    def set_length(self, sequence: int, length: int) -> None:
        """A hit was found."""
        self.lengths[index_of(sequence)] = length

    def end(self, sequence: int) -> int:
        """Slots that are valid and whose ids are known: those of a sequence that was cancelled may not be."""
        index = index_of(sequence)
        return int(min(self.lengths[index], self.known[index]))

    def ids(self, sequence: int, begin: int, end: int) -> bytes:
        """Packed ids of the positions ``begin`` to ``end``, of the last ``width`` ones."""
        return pack(self.ring[index_of(sequence), np.arange(begin, end) % self.width])

    def look_at(self, sequence: int, length: int) -> None:
        """Have the sequence named by ``commit`` once its length reaches ``length``."""
        self.due[index_of(sequence)] = min(length, NEVER)

    def commit(self, message: Commit) -> list[int]:
        """Take a step's ids and lengths; the sequences that are due."""
        sequences, lengths = unpack(message.sequences), unpack(message.lengths)
        rows, starts, ids = indexes(sequences), unpack(message.starts), unpack(message.ids)
        one_each = message.offsets == ramp(len(sequences) + 1)
        counts = None if one_each else np.diff(unpack(message.offsets))
        open_ = (rows < len(self.handles)) & (self.handles[rows % len(self.handles)] == sequences)
        if not open_.all():  # closed while the step was in flight
            ids = ids[open_] if counts is None else ids[np.repeat(open_, counts)]
            counts = None if counts is None else counts[open_]
            sequences, lengths, rows, starts = sequences[open_], lengths[open_], rows[open_], starts[open_]
        self.lengths[rows] = lengths
        if counts is None:
            self.ring[rows, (starts + 1) % self.width] = ids
            self.known[rows] = starts + 2
        elif len(ids):
            places = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(starts + 1, counts)
            self.ring[np.repeat(rows, counts), places % self.width] = ids
            some = counts > 0
            self.known[rows[some]] = (starts + 1 + counts)[some]
        found: list[int] = sequences[lengths >= self.due[rows]].tolist()
        return found
