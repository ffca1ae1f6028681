"""Sequences that decode in unison get the messages that they would get one by one."""

import random
from collections import deque
from typing import Any

import pytest

from antiphon.actors.columns import pack, ramp, unpack
from antiphon.actors.pace import Pace
from antiphon.actors.protocol import Admit, Executed, Handle, Message, Sampling, Verified
from antiphon.actors.sequences import Sequence
from antiphon.actors.step import Part, Step
from antiphon.actors.unison import Unison, UnisonStep

LOGITS = Executed(Handle("cell", 1, 0, 1), {})


def sequences(draw: random.Random, count: int, most: int = 12) -> list[Sequence]:
    made = []
    for index in range(count):
        ids = [draw.randrange(100) for _ in range(draw.randint(2, 9))]
        sampling = Sampling(most + index)
        one = Sequence(Admit(bytes([index]) * 16, f"t{index % 2}", pack(ids), len(ids), sampling, 0), ids, "tokenizer",
                       frozenset({7}))
        one.handle, one.computed, one.planned, one.granted = index + 1, len(ids) - 1, len(ids) - 1, 64
        made.append(one)
    return made


class Lane:
    """Launches and finishes steps as the scheduler does, at most two in flight; notes what it would send."""

    def __init__(self, running: list[Sequence], promise: bool, together: bool):
        self.running, self.promise, self.together = running, promise, together
        self.flight: deque[Step] = deque()
        self.unison: Unison | None = None
        self.number = 0
        self.sent: list[tuple[Any, ...]] = []

    def launch(self) -> None:
        self.number += 1
        parts = [Part(s, 1) for s in self.running]
        step = Step(self.number, parts)
        if self.unison is not None and not self.unison.can_go_on():
            self.part()
            parts = [Part(s, 1) for s in self.running]
            step = Step(self.number, parts)
        if self.unison is None and self.together and Unison.possible(parts, self.flight):
            self.unison = Unison(parts, self.flight, self.promise)
            self.flight = deque(UnisonStep.of(s, self.unison, turn) for turn, s in enumerate(self.flight))
        if self.unison is not None:
            step = UnisonStep(self.number, self.unison, self.unison.launched)
        self.note(step.reserve(8, Pace()))
        self.note(step.execute([], 0, (), False))
        step.launched(self.promise)
        step.verify = step.to_verify(LOGITS)
        self.note(step.verify)
        self.flight.append(step)

    def part(self) -> None:
        assert self.unison is not None
        self.unison.settle()
        self.unison = None
        self.flight = deque(s.apart() if isinstance(s, UnisonStep) else s for s in self.flight)

    def finish(self, tokens: list[int]) -> bool:
        """Apply a verdict of one token each; whether all go on."""
        step = self.flight.popleft()
        rows = len(tokens)
        verified = Verified(ramp(rows + 1), pack(tokens), bytes(4 * rows + 4), b"")
        if isinstance(step, UnisonStep):
            if not step.unison.ends(verified):
                commit, emit = step.unison.apply(step.number, verified)
                self.note(commit)
                self.sent.append(("Emit", emit.requests, unpack(emit.index).tolist(), unpack(emit.ids).tolist()))
                return True
            self.part()
            step = step.apart()
        kept, ids, emitted, finished = step.apply(verified)
        self.note(step.commit(kept, ids))
        self.sent.append(("Emit", tuple(s.request for s, *_ in emitted), [index for _, index, _, _ in emitted],
                          [t for _, _, new, _ in emitted for t in new]))
        return not finished

    def note(self, message: Message | None) -> None:
        if message is not None:
            self.sent.append((type(message).__name__, *(getattr(message, name) for name in message.__struct_fields__)))


def state(one: Sequence) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__slots__ if name not in {"arrival", "sampling", "have"}}


@pytest.mark.parametrize("promise", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_what_is_sent_and_what_is_left_are_the_same(seed: int, promise: bool) -> None:
    lanes = []
    for together in (False, True):
        draw = random.Random(seed)
        lane = Lane(sequences(draw, draw.randint(2, 5)), promise, together)
        going = True
        while going and all(len(s.ids) + len(lane.flight) + 1 < s.end for s in lane.running):
            lane.launch()
            while lane.flight and going and (not promise or len(lane.flight) == 2 or draw.random() < 0.3):
                going = lane.finish([draw.choice([*range(8, 40), 7]) for _ in lane.running])
            if draw.random() < 0.1 and lane.unison is not None:
                lane.part()
        if lane.unison is not None:
            lane.part()
        lanes.append(lane)
    one, many = lanes
    assert one.sent == many.sent
    assert [state(s) for s in one.running] == [state(s) for s in many.running]


def test_one_alone_and_those_about_to_end_are_not_in_unison() -> None:
    made = sequences(random.Random(1), 3)
    assert not Unison.possible([Part(made[0], 1)], [])
    assert Unison.possible([Part(s, 1) for s in made], [])
    made[1].end = made[1].total + 1
    assert not Unison.possible([Part(s, 1) for s in made], [])
