"""One step: the columns it becomes, and what the verdict makes of its sequences."""

import random

import pytest

from antiphon.actors.columns import pack, unpack
from antiphon.actors.pace import Pace
from antiphon.actors.protocol import Admit, Commit, Drafted, Execute, Executed, Sampling, Verified, Verify
from antiphon.actors.sequences import Sequence
from antiphon.actors.step import Part, Step


def sequence(handle: int, ids: list[int], planned: int = 0, most: int = 50, stops: tuple[int, ...] = ()) -> Sequence:
    made = Sequence(Admit(bytes([handle]) * 16, "local", pack(ids), len(ids), Sampling(most), 0), ids, "tokenizer",
                    frozenset(stops))
    made.handle, made.computed, made.planned, made.granted = handle, planned, planned, 1000
    return made


def step(*parts: Part, number: int = 7) -> Step:
    return Step(number, list(parts))


def execute(made: Step, changes: tuple[int, ...] = ()) -> Execute:
    return made.execute(list(changes), 0, (), reduce=False)


def columns(message: Execute | Verify | Commit, *names: str) -> list[list[int]]:
    return [unpack(getattr(message, name)).tolist() for name in names]


def verified(*rows: tuple[list[int], list[int]]) -> Verified:
    """Per sequence the emitted ids and the kept draft rows."""
    offsets, ids, kept_offsets, kept = [0], list[int](), [0], list[int]()
    for new, stay in rows:
        ids += new
        kept += stay
        offsets.append(len(ids))
        kept_offsets.append(len(kept))
    return Verified(pack(offsets), pack(ids), pack(kept_offsets), pack(kept))


def test_a_prompt_in_chunks_predicts_with_its_last_row_only() -> None:
    made = sequence(1, [10, 11, 12, 13, 14])
    first = step(Part(made, 3))
    message = execute(first)
    assert columns(message, "starts", "row_offsets", "ids", "positions", "logit_rows") == [
        [0], [0, 3], [10, 11, 12], [0, 1, 2], []]
    assert message.finish
    first.launched(promise=True)
    assert (made.planned, made.flight, made.unknown) == (3, 1, 0)
    second = step(Part(made, 2))
    message = execute(second)
    assert columns(message, "starts", "ids", "positions", "logit_rows") == [[3], [13, 14], [3, 4], [1]]
    assert not message.finish
    second.launched(promise=True)
    assert (made.planned, made.total, made.unknown, made.pending) == (5, 6, 1, (7, 0))
    assert first.apply(None).emitted == []
    assert (made.computed, made.planned, made.flight) == (3, 5, 1)
    outcome = second.apply(verified(([15], [])))
    assert [(index, ids, finish) for _, index, ids, finish in outcome.emitted] == [(0, [15], "")]
    assert (made.computed, made.planned, made.total, made.flight) == (5, 5, 6, 0)


def test_a_token_that_is_not_known_yet_is_a_pending_row() -> None:
    one, two = sequence(1, [5], planned=0), sequence(2, [6], planned=0)
    ahead = step(Part(one, 1), Part(two, 1), number=3)
    execute(ahead)
    ahead.launched(promise=True)
    message = execute(step(Part(two, 1), number=4))
    assert columns(message, "starts", "ids", "positions") == [[1], [-2], [1]]
    assert message.pending_step == 3


def test_a_chain_of_drafts_takes_the_slots_after_its_row() -> None:
    made = sequence(1, [1, 2, 3, 4], planned=3)
    drafting = step(Part(made, 1))
    assert drafting.take_drafts(Drafted(pack([0, 2]), pack([8, 9]), b"")) == set()
    message = execute(drafting)
    assert columns(message, "row_offsets", "ids", "positions", "logit_rows") == [
        [0, 3], [4, 8, 9], [3, 4, 5], [0, 1, 2]]
    assert message.parents == b""
    assert columns(drafting.to_verify(Executed(None, {})), "positions", "offsets", "tokens") == [[4], [0, 3], [0, 8, 9]]
    drafting.launched(promise=True)
    assert made.unknown == 0  # how many there will be is not known
    outcome = drafting.apply(verified(([8, 7], [1])))
    commit = drafting.commit(outcome.kept, outcome.ids)
    assert columns(commit, "starts", "kept", "ids", "lengths") == [[3], [1], [8, 7], [5]]
    assert (made.computed, made.planned, made.ids) == (5, 5, [1, 2, 3, 4, 8, 7])


def test_a_tree_beside_a_chunk_of_a_prompt() -> None:
    tree, prompt = sequence(1, [1, 2, 3, 4], planned=3), sequence(2, [5, 6, 7])
    made = step(Part(tree, 1), Part(prompt, 3))
    # 8 and 9 follow token 4, 10 follows 9.
    made.take_drafts(Drafted(pack([0, 3, 3]), pack([8, 9, 10]), pack([-1, -1, 1])))
    message = execute(made)
    assert columns(message, "row_offsets", "ids", "positions", "parents", "logit_rows") == [
        [0, 4, 7], [4, 8, 9, 10, 5, 6, 7], [3, 4, 4, 5, 0, 1, 2], [-1, 0, 0, 2, -1, 0, 1], [0, 1, 2, 3, 6]]
    verify = made.to_verify(Executed(None, {}))
    assert columns(verify, "offsets", "tokens", "parents") == [[0, 4, 5], [0, 8, 9, 10, 0], [-1, 0, 0, 2, -1]]
    made.launched(promise=False)
    outcome = made.apply(verified(([9, 10, 11], [2, 3]), ([12], [])))
    commit = made.commit(outcome.kept, outcome.ids)
    assert columns(commit, "starts", "kept_offsets", "kept", "ids", "lengths") == [
        [3, 2], [0, 2, 2], [2, 3], [9, 10, 11, 12], [6, 3]]


def test_a_stop_or_the_limit_among_drafts_drops_what_follows() -> None:
    stopped, full = sequence(1, [1, 2], planned=1, stops=(8,)), sequence(2, [1, 2], planned=1, most=2)
    made = step(Part(stopped, 1), Part(full, 1))
    made.take_drafts(Drafted(pack([0, 3, 6]), pack([7, 8, 9, 7, 8, 9]), b""))
    execute(made)
    made.launched(promise=False)
    outcome = made.apply(verified(([7, 8, 9, 10], [1, 2, 3]), ([7, 8, 9, 10], [1, 2, 3])))
    assert [(ids, finish) for _, _, ids, finish in outcome.emitted] == [([7, 8], "stop"), ([7, 8], "length")]
    assert outcome.kept == [[1], [1]]
    assert [(s, finish) for s, finish in outcome.finished] == [(stopped, "stop"), (full, "length")]


def test_a_token_planned_after_a_stop_is_no_one_s() -> None:
    made = sequence(1, [1, 2], planned=1, stops=(9,))
    first, second = step(Part(made, 1), number=1), None
    execute(first)
    first.launched(promise=True)
    second = step(Part(made, 1), number=2)
    execute(second)
    second.launched(promise=True)
    assert first.apply(verified(([9], []))).finished == [(made, "stop")]
    late = second.apply(verified(([5], [])))
    assert (late.emitted, late.finished, late.ids) == ([], [], [[]])
    assert made.ids == [1, 2, 9]
    assert (made.flight, made.unknown, made.total) == (0, 0, 3)


def test_tokens_of_a_cancelled_sequence_are_dropped() -> None:
    made = sequence(1, [1, 2], planned=1)
    cancelled = step(Part(made, 1))
    execute(cancelled)
    cancelled.launched(promise=True)
    made.cancelled = "cancelled"
    assert cancelled.apply(verified(([5], []))).emitted == []
    assert made.ids == [1, 2]


def test_the_last_token_is_not_promised() -> None:
    made = sequence(1, [1, 2], planned=1, most=1)
    last = step(Part(made, 1))
    execute(last)
    last.launched(promise=True)
    assert (made.unknown, made.uncomputed) == (0, 0)


@pytest.mark.parametrize(("granted", "ahead", "asked"), [
    (6, 8, None),  # enough
    (5, 8, (6, 14)),
    (5, 0, (6, 6)),
    (5, 100, (6, 54)),  # never beyond the request's end
])
def test_slots_are_asked_for_when_the_granted_ones_do_not_suffice(
        granted: int, ahead: int, asked: tuple[int, int] | None) -> None:
    made = sequence(1, [1, 2, 3, 4], planned=3)
    made.granted = granted
    drafting = step(Part(made, 1))
    drafting.take_drafts(Drafted(pack([0, 2]), pack([8, 9]), b""))
    message = drafting.reserve(ahead, Pace())
    assert (message and (unpack(message.need).tolist()[0], unpack(message.want).tolist()[0])) == asked


def test_a_prefix_that_is_found_shortens_the_part() -> None:
    part = Part(sequence(1, list(range(20))), 8)
    made = step(part)
    assert made.predicting == []
    part.sequence.planned = 15
    part.restart(15)
    made.keep(made.parts)
    assert (part.start, part.count, made.predicting) == (15, 5, [part])
    assert columns(execute(made), "starts", "ids", "logit_rows") == [[15], [15, 16, 17, 18, 19], [4]]


def test_the_drafter_is_told_what_it_has_not_seen_and_lost_mirrors_get_no_drafts() -> None:
    one, two = sequence(1, [1, 2, 3], planned=2), sequence(2, [4, 5, 6], planned=2)
    one.have, two.have = 3, 1
    made = step(Part(one, 1), Part(two, 1))
    message = made.draft([4, 2])
    assert [unpack(c).tolist() for c in (message.have, message.offsets, message.ids, message.budgets)] == [
        [3, 1], [0, 0, 2], [5, 6], [4, 2]]
    lost = made.take_drafts(Drafted(pack([0, 2, 2]), pack([7, 8]), b"", lost=pack([2])))
    assert lost == {2}
    assert (made.parts[0].tokens, made.parts[1].tokens) == ([7, 8], [])


def test_steps_of_single_rows_have_the_columns_that_any_step_has() -> None:
    """The short way and the long way through a step must agree."""
    draw = random.Random(3)
    for _ in range(200):
        parts = []
        for handle in range(draw.randint(1, 6)):
            made = sequence(handle, [draw.randrange(99) for _ in range(draw.randint(1, 9))])
            made.planned = len(made.ids) - 1
            if draw.random() < 0.4:
                made.planned, made.unknown, made.total, made.pending = len(made.ids), 1, len(made.ids) + 1, (5, handle)
            parts.append(Part(made, 1))
        short, long = step(*parts), step(*parts)
        one = execute(short, (1, 2, 3, 4))
        assert short.plain
        # A part of another kind makes the step take the long way; its own columns are cut off again.
        extra = Part(sequence(99, [1, 2, 3]), 2)
        long.keep([*parts, extra])
        two = execute(long, (1, 2, 3, 4))
        assert not long.plain
        assert columns(one, "logit_rows") == columns(two, "logit_rows") == [list(range(len(parts)))]
        assert columns(two, "starts", "ids", "positions") == [
            [*a, *b] for a, b in zip(columns(one, "starts", "ids", "positions"), ([0], [1, 2], [0, 1]), strict=True)]
        assert (one.pending_step, one.changes) == (two.pending_step, two.changes)
        assert columns(short.to_verify(Executed(None, {})), "positions", "offsets", "tokens") == columns(
            long.to_verify(Executed(None, {})), "positions", "offsets", "tokens")
        answer = [[draw.randrange(99)] for _ in parts]
        kept: list[list[int]] = [[] for _ in parts]
        long.keep(parts)
        assert short.commit(kept, answer) == long.commit(kept, answer)
