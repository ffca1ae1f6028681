"""A sequence as the scheduler keeps it: what is known, what is on its way, and when it is over."""

import pytest

from antiphon.actors.columns import INDEX_BITS, index_of, pack, unpack
from antiphon.actors.protocol import Admit, Sampling
from antiphon.actors.sequences import Handles, Sequence


def admit(ids: list[int], prompt: int = 3, **sampling: object) -> Admit:
    return Admit(b"r" * 16, "local", pack(ids), prompt, Sampling(**sampling), 7)  # type: ignore[arg-type]


def sequence(ids: list[int], stops: tuple[int, ...] = (), **sampling: object) -> Sequence:
    return Sequence(admit(ids, **sampling), list(ids), "tokenizer", frozenset(stops))


def test_a_new_sequence_has_everything_before_it() -> None:
    made = sequence([1, 2, 3], max_tokens=5)
    assert (made.generated, made.total, made.left, made.uncomputed, made.end) == (0, 3, 5, 3, 8)
    assert made.finish() == ""


@pytest.mark.parametrize(("ids", "taken", "finish"), [
    ([4], [4], ""),
    ([4, 9, 5], [4, 9], "stop"),
    ([4, 5, 6, 7, 8], [4, 5, 6, 7], "length"),
    ([4, 5, 6, 9], [4, 5, 6, 9], "stop"),
    ([9], [9], "stop"),
])
def test_verified_ids_are_taken_up_to_a_stop_or_the_limit(ids: list[int], taken: list[int], finish: str) -> None:
    made = sequence([1, 2, 3], stops=(9,), max_tokens=4)
    assert made.append(ids) == (taken, finish)
    assert made.ids == [1, 2, 3, *taken]
    assert made.finish() == finish


def test_a_stop_id_in_the_prompt_ends_nothing() -> None:
    assert sequence([1, 2, 9], stops=(9,)).finish() == ""
    assert sequence([1, 2, 9, 9], stops=(9,)).finish() == "stop"


def test_unknown_tokens_count_as_tokens() -> None:
    made = sequence([1, 2, 3], max_tokens=2)
    made.unknown, made.total = 1, 4
    assert (made.total, made.left, made.generated) == (4, 1, 0)
    made.unknown = 0
    made.append([5])
    assert (made.total, made.left, made.generated) == (4, 1, 1)


def test_a_preempted_sequence_begins_anew_with_all_it_knows() -> None:
    made = sequence([1, 2, 3], max_tokens=9)
    made.handle, made.computed, made.planned, made.granted, made.have = 5, 3, 4, 16, 4
    made.append([4, 5])
    made.rewind()
    assert (made.handle, made.computed, made.planned, made.granted, made.have) == (-1, 0, 0, 0, 0)
    assert (made.uncomputed, made.left) == (5, 7)
    opening = made.opening()
    assert (unpack(opening.ids).tolist(), opening.prompt_length) == ([1, 2, 3, 4, 5], 3)


def test_a_newcomer_continues_a_sequence_only_where_it_has_been_and_with_the_same_request() -> None:
    made = sequence([1, 2, 3, 4, 5])
    cases = [([1, 2, 3], True), ([1, 2, 3, 4, 5], True), ([1, 2, 3, 9], False), ([1, 2, 3, 4, 5, 6], False)]
    for ids, goes_on in cases:
        assert made.continues(admit(ids), ids) is goes_on
    assert not made.continues(admit([1, 2, 3], prompt=2), [1, 2, 3])
    assert not made.continues(admit([1, 2, 3], temperature=0.5), [1, 2, 3])
    made.cancelled = "cancelled"
    assert not made.continues(admit([1, 2, 3]), [1, 2, 3])


def test_handles_are_dense_and_never_the_same_twice() -> None:
    handles = Handles()
    first, second = handles.take(), handles.take()
    assert {index_of(first), index_of(second)} == {0, 1}
    handles.give(first)
    again = handles.take()
    assert index_of(again) == index_of(first)
    assert again != first
    assert len({handles.take() for _ in range(100)}) == 100
    assert index_of(handles.take()) == 102


def test_there_are_as_many_handles_as_an_index_has_room_for() -> None:
    handles = Handles()
    for _ in range(1 << INDEX_BITS):
        handles.take()
    with pytest.raises(OverflowError):
        handles.take()
