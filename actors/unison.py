"""Sequences that decode in unison: the same ones, one row each, step after step, kept as columns instead of objects.

What a step of theirs needs is then a few additions of columns; a loop over sequences in Python costs some 10 us each.
It knows neither queues nor who receives the messages. As long as a unison lasts, ``flight``, ``planned``, ``computed``,
``unknown``, ``total``, ``pending`` and ``have`` of its sequences are those of the moment it began; ``settle`` brings
them up to date. Their ``ids`` and ``granted`` are always true.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Sequences

import numpy as np

from antiphon.actors.columns import I32, pack, ramp, unpack
from antiphon.actors.pace import Pace
from antiphon.actors.protocol import Commit, Emit, Execute, Executed, Reserve, Verified, Verify
from antiphon.actors.step import Part, Step

FEWEST = 2  # sequences: for one alone the columns cost more than the loop


class Unison:
    """Counts steps: ``launched`` and ``applied`` since all sequences stood at ``slots``, their first rows' KV slots."""

    def __init__(self, parts: Sequences[Part], flight: Iterable[Step], promise: bool):
        """``parts`` are the next step's, one row each; the steps in ``flight`` are steps of the same rows before it."""
        self.sequences = [p.sequence for p in parts]
        self.promise = promise  # the next step may be planned before this one's tokens are known
        before = list(flight)
        self.launched, self.applied = len(before), 0
        self.slots = np.array([p.start for p in parts], np.int32) - np.int32(self.launched)
        self.granted = np.array([s.granted for s in self.sequences], np.int32)
        self.handles = pack([s.handle for s in self.sequences])
        # A launch is in unison while every sequence has at least one more token to come after it.
        self.most = self.launched + min(s.end - s.total for s in self.sequences) - 1
        self.stops = frozenset().union(*(s.stops for s in self.sequences))
        self.tokenizer = self.sequences[0].tokenizer
        self.tenants: dict[str, int] = {}  # rows of a step
        for s in self.sequences:
            self.tenants[s.tenant] = self.tenants.get(s.tenant, 0) + 1
        self._requests = tuple(s.request for s in self.sequences)
        self._generated = np.array([s.generated for s in self.sequences], np.int32)
        self._going_on = ("",) * len(parts)
        self._pending = pack([-1 - row for row in range(len(parts))])
        self._none = bytes(4 * len(parts))
        self._no_offsets = bytes(4 * len(parts) + 4)
        self._ramp, self._ramp_on = ramp(len(parts)), ramp(len(parts) + 1)
        self._rooms = int((self.granted - self.slots).min())  # launches in all that need no Reserve
        self._last = before[-1].number if before else -1  # step launched last

    @staticmethod
    def possible(parts: Sequences[Part], flight: Iterable[Step]) -> bool:
        """Whether these parts of the next step continue what is in flight, one row each."""
        if len(parts) < FEWEST or any(p.count != 1 or not p.last or p.sequence.total + 1 >= p.sequence.end
                                      or p.sequence.tokenizer != parts[0].sequence.tokenizer for p in parts):
            return False
        handles = [p.sequence.handle for p in parts]
        return all(step.plain and all(p.promised for p in step.parts)
                   and [p.sequence.handle for p in step.parts] == handles for step in flight)

    def can_go_on(self) -> bool:
        """Whether the next step can be one of the unison."""
        return self.launched < self.most

    def settle(self) -> None:
        """Bring the sequences up to date."""
        flying = self.launched - self.applied
        slots = self.slots.tolist()
        for row, sequence in enumerate(self.sequences):
            sequence.flight = flying
            sequence.planned = slots[row] + self.launched
            sequence.computed = slots[row] + self.applied
            sequence.unknown = flying if self.promise else 0
            sequence.total = len(sequence.ids) + sequence.unknown
            sequence.have = len(sequence.ids)
            if self.promise:
                sequence.pending = (self._last, row)

    # ---- columns of a step

    def starts(self, turn: int) -> I32:
        """KV slot that each row of the unison's step number ``turn`` writes."""
        starts: I32 = self.slots + np.int32(turn)
        return starts

    def reserve(self, number: int, turn: int, ahead: int) -> Reserve | None:
        """As ``Step.reserve``."""
        if turn < self._rooms:
            return None
        need = self.starts(turn) + 1
        rows = np.flatnonzero(need + ahead // 2 > self.granted)
        ends = np.array([self.sequences[row].end for row in rows.tolist()], np.int32)
        want = np.maximum(need[rows], np.minimum(need[rows] + ahead, ends)).astype(np.int32)
        return Reserve(number, pack(unpack(self.handles)[rows]), pack(need[rows]), pack(want))

    def grant(self, handles: list[int], granted: list[int]) -> None:
        """Take note of what sequences were granted."""
        slots = dict(zip(handles, granted, strict=True))
        for row, sequence in enumerate(self.sequences):
            sequence.granted = slots.get(sequence.handle, sequence.granted)
            self.granted[row] = sequence.granted
        self._rooms = int((self.granted - self.slots).min())

    def execute(self, number: int, turn: int, changes: list[int], ticket: int, reduce: bool) -> Execute:
        """The rows: tokens that nobody has seen yet if a step is in flight."""
        pending = self.promise and turn > self.applied
        ids = self._pending if pending else pack([s.ids[-1] for s in self.sequences])
        starts = self.starts(turn).tobytes()
        return Execute(number, self.handles, starts, self._ramp_on, ids, starts, b"", self._ramp, pack(changes),
                       self._last if pending else -1, ticket, (), reduce)

    def launch(self, number: int) -> None:
        """A step of the unison is on its way."""
        self.launched += 1
        self._last = number

    def verify(self, number: int, turn: int, executed: Executed) -> Verify:
        """The rows for the verifier."""
        return Verify(number, self.handles, self.starts(turn + 1).tobytes(), self._ramp_on, self._none, b"",
                      executed.logits, executed.frames)

    def ends(self, verified: Verified) -> bool:
        """Whether a verdict ends a sequence, so that it is no longer the unison's to apply."""
        return verified.offsets != self._ramp_on or not self.stops.isdisjoint(unpack(verified.ids).tolist())

    def apply(self, number: int, verified: Verified) -> tuple[Commit, Emit]:
        """Take a verdict that ends nothing: one token each."""
        for sequence, token in zip(self.sequences, unpack(verified.ids).tolist(), strict=True):
            sequence.ids.append(token)
        turn, self.applied = self.applied, self.applied + 1
        commit = Commit(number, self.handles, self.starts(turn).tobytes(), self._no_offsets, b"", self._ramp_on,
                        verified.ids, self.starts(turn + 1).tobytes())
        emit = Emit(self._requests, (self._generated + np.int32(turn)).tobytes(), self._ramp_on, verified.ids,
                    self._going_on)
        return commit, emit


class UnisonStep(Step):
    """One step of a unison, number ``turn`` of it; ``apart`` makes a step of parts of it."""

    def __init__(self, number: int, unison: Unison, turn: int):
        super().__init__(number, [])
        self.unison = unison
        self.turn = turn
        self.handles = unison.handles
        self.plain = True

    @classmethod
    def of(cls, step: Step, unison: Unison, turn: int) -> "UnisonStep":
        """A step in flight that a unison takes over."""
        made = cls(step.number, unison, turn)
        made.executed, made.verify, made.verified, made.began = step.executed, step.verify, step.verified, step.began
        return made

    @property
    def predicts(self) -> bool:
        """Every row predicts a token."""
        return True

    def grant(self, handles: list[int], hits: list[int], granted: list[int]) -> None:
        """Sequences may use ``granted`` slots; nobody is new."""
        self.unison.grant(handles, granted)

    def work(self) -> tuple[int, int]:
        """No rows of prompts."""
        return 0, 0

    def apart(self) -> Step:
        """The same step by parts, once the unison is settled."""
        parts = []
        for row, (sequence, start) in enumerate(zip(self.unison.sequences, self.unison.starts(self.turn).tolist(),
                                                    strict=True)):
            part = Part(sequence, 1)
            part.start, part.last, part.logit_row = start, True, row
            part.promised = self.unison.promise
            parts.append(part)
        made = Step(self.number, parts)
        made.plain = True
        made.executed, made.verify, made.verified, made.began = self.executed, self.verify, self.verified, self.began
        return made

    def reserve(self, ahead: int, pace: Pace) -> Reserve | None:
        """Ask for slots if a sequence needs more than it was granted."""
        return self.unison.reserve(self.number, self.turn, ahead)

    def execute(self, changes: list[int], ticket: int, capture: tuple[str, ...], reduce: bool) -> Execute:
        """The rows for the executor."""
        return self.unison.execute(self.number, self.turn, changes, ticket, reduce)

    def rows(self) -> dict[str, int]:
        """Rows by tenant."""
        return self.unison.tenants

    def to_verify(self, executed: Executed) -> Verify:
        """The rows for the verifier."""
        return self.unison.verify(self.number, self.turn, executed)

    def launched(self, promise: bool) -> None:
        """The step is in flight."""
        self.unison.launch(self.number)
