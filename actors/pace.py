"""The pace of prefill: seconds that a row of a prompt takes, learned from the steps that computed some.

It does not know sequences.
"""

KEEP = 0.9  # of the weight of earlier steps, each time
FEWEST = 16  # rows of prompts in a step that tells something


class Pace:
    """Least squares of seconds = ``row_s`` * rows + ``row_slot_s`` * (slots of context seen by these rows)."""

    def __init__(self) -> None:
        self.row_s = 0.0  # 0: not known yet
        self.row_slot_s = 0.0
        self._ended = 0.0  # when the step before ended
        self._sums = [0.0] * 5  # of rows^2, rows * slots, slots^2, rows * seconds, slots * seconds

    def take(self, work: tuple[int, int], began: float, ended: float) -> None:
        """A step with so many (rows, slots) ran from ``began`` or the end of the step before, whichever is later."""
        seconds = ended - max(began, self._ended)
        self._ended = ended
        rows, slots = work
        if rows < FEWEST or seconds <= 0:
            return
        added = (rows * rows, rows * slots, slots * slots, rows * seconds, slots * seconds)
        self._sums = [KEEP * old + new for old, new in zip(self._sums, added, strict=True)]
        a, b, c, d, e = self._sums
        determinant = a * c - b * b
        row, slot = ((d * c - e * b) / determinant, (a * e - b * d) / determinant) if determinant > 1e-6 * a * c \
            else (0.0, -1.0)
        # Too few kinds of steps to tell the two apart, or noise: all of it is the rows'.
        self.row_s, self.row_slot_s = (row, slot) if row > 0 and slot >= 0 else (d / a, 0.0)
