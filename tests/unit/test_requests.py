"""The gateway's ledger without sockets: output in order, resumes, and what is told to whom."""

import pytest
from tests.gates import Bench

from antiphon.actors.columns import pack, unpack
from antiphon.actors.protocol import Cancel, Generate, Refuse, Sampling


@pytest.fixture
def bench() -> Bench:
    return Bench()


# ---- a usual life


def test_a_request_is_told_sent_and_forgotten(bench: Bench) -> None:
    request = bench.ask(1)
    assert [type(m) for m in bench.sent()] == [Generate]
    assert bench.door.told == [request]
    bench.delta(request, 0, [5, 6], text="ab")
    bench.delta(request, 2, [7], "length", "c")
    assert bench.outputs() == [(0, [5, 6], "ab", ""), (2, [7], "c", "length")]
    assert (bench.gate.entries, bench.gate.clients) == ({}, {})


def test_a_client_that_takes_nothing_gets_everything_later_in_one_piece(bench: Bench) -> None:
    request = bench.ask(1)
    bench.door.taking = False
    bench.delta(request, 0, [5], text="a")
    bench.delta(request, 1, [6], "stop", "b")
    assert bench.outputs() == []
    bench.door.taking = True
    bench.gate.flush(b"c")
    assert bench.outputs() == [(0, [5, 6], "ab", "stop")]
    assert bench.gate.entries == {}


def test_output_goes_out_only_after_what_is_needed_to_resume(bench: Bench) -> None:
    bench.door.taking = False
    request = bench.ask(1)
    bench.delta(request, 0, [5])
    bench.door.taking = True
    bench.gate.flush(b"c")
    assert bench.door.told == [request]
    assert bench.outputs() == [(0, [5], "", "")]


def test_a_cancel_is_passed_on_once_and_its_end_comes_back(bench: Bench) -> None:
    request = bench.ask(1)
    bench.sent()
    bench.gate.cancel(b"stranger", request)
    bench.gate.cancel(b"c", request)
    bench.gate.cancel(b"c", request)
    bench.gate.cancel(b"c", b"unknown")
    assert bench.sent() == [Cancel(request)]
    bench.delta(request, 0, [], "cancelled")
    assert bench.outputs() == [(0, [], "", "cancelled")]


def test_a_cancel_that_overtook_the_admission_is_an_end_and_no_refusal(bench: Bench) -> None:
    request = bench.ask(1)
    bench.gate.cancel(b"c", request)
    bench.gate.on_refuse(Refuse(request, "cancelled", "before it was admitted"))
    assert bench.outputs() == [(0, [], "", "cancelled")]
    assert bench.door.refusals == []


def test_a_cancel_of_an_earlier_life_of_the_id_does_not_end_this_one(bench: Bench) -> None:
    request = bench.ask(1)
    bench.sent()
    bench.gate.on_refuse(Refuse(request, "cancelled", "before it was admitted"))
    assert unpack(bench.only_resume().prompt).tolist() == [1]
    assert (bench.outputs(), bench.door.refusals) == ([], [])


def test_a_client_that_is_gone_leaves_nothing(bench: Bench) -> None:
    requests = [bench.ask(1), bench.ask(2)]
    other = bench.ask(3, b"other")
    bench.sent()
    bench.gate.gone(b"c")
    assert {m.request for m in bench.sent()} == set(requests)
    assert list(bench.gate.entries) == [other]
    bench.gate.gone(b"nobody")


# ---- order


def test_old_output_is_dropped_and_missing_output_is_asked_for_once(bench: Bench) -> None:
    request = bench.ask(1)
    bench.sent()
    bench.delta(request, 0, [5, 6])
    bench.delta(request, 0, [5])
    assert bench.sent() == []
    bench.delta(request, 4, [9])
    bench.delta(request, 5, [9])
    assert unpack(bench.only_resume().ids).tolist() == [5, 6]
    bench.delta(request, 2, [7, 8, 9])
    assert bench.outputs()[-1][:2] == (2, [7, 8, 9])


def test_output_that_overlaps_is_asked_for_anew_because_its_text_cannot_be_cut(bench: Bench) -> None:
    request = bench.ask(1)
    bench.delta(request, 0, [5, 6])
    bench.sent()
    bench.delta(request, 1, [6, 7], text="67")
    assert unpack(bench.only_resume().ids).tolist() == [5, 6]


def test_an_end_that_does_not_follow_still_ends_what_was_cancelled(bench: Bench) -> None:
    request = bench.ask(1)
    bench.gate.cancel(b"c", request)
    bench.delta(request, 8, [], "cancelled")
    assert bench.outputs() == [(0, [], "", "cancelled")]


def resume(bench: Bench, request: bytes, done: list[int], client: bytes = b"c") -> None:
    bench.gate.resume(client, request, pack([1]), pack(done), Sampling(100), 5)


def test_a_resume_of_a_running_request_rewinds_it(bench: Bench) -> None:
    request = bench.ask(1)
    bench.delta(request, 0, [5, 6, 7, 8])
    bench.sent()
    bench.outputs()
    resume(bench, request, [5, 6])
    assert unpack(bench.only_resume().ids).tolist() == [5, 6]
    bench.delta(request, 4, [9])  # was on its way
    assert (bench.sent(), bench.outputs()) == ([], [])
    bench.delta(request, 2, [7, 8, 9], text="789")
    assert bench.outputs() == [(2, [7, 8, 9], "789", "")]


def test_a_resume_at_the_present_place_asks_for_nothing(bench: Bench) -> None:
    request = bench.ask(1)
    bench.delta(request, 0, [5, 6])
    bench.sent()
    resume(bench, request, [5, 6])
    assert bench.sent() == []
    bench.delta(request, 2, [7])
    assert bench.outputs()[-1][:2] == (2, [7])


def test_a_resume_beyond_what_the_ledger_has_takes_the_client_s_word(bench: Bench) -> None:
    request = bench.ask(1)
    bench.delta(request, 0, [5])
    bench.sent()
    resume(bench, request, [5, 6, 7])
    assert unpack(bench.only_resume().ids).tolist() == [5, 6, 7]
    bench.delta(request, 3, [8])
    assert bench.outputs()[-1][:2] == (3, [8])


def test_a_resume_of_a_request_that_waits_to_be_delivered_computes_it_again(bench: Bench) -> None:
    request = bench.ask(1)
    bench.door.taking = False
    bench.delta(request, 0, [5, 6], "stop", "ab")
    bench.door.taking = True
    bench.sent()
    resume(bench, request, [5])
    assert unpack(bench.only_resume().ids).tolist() == [5]
    bench.delta(request, 1, [6], "stop", "b")
    assert bench.outputs() == [(1, [6], "b", "stop")]


def test_the_same_request_once_more_is_answered_from_the_start(bench: Bench) -> None:
    request = bench.ask(1)
    bench.delta(request, 0, [5])
    bench.sent()
    bench.gate.generate(b"c", request, None, pack([1]), False, Sampling(100), 5)
    assert bench.door.told == [request, request]
    assert unpack(bench.only_resume().ids).tolist() == []
    bench.gate.generate(b"c", request, None, pack([2]), False, Sampling(100), 5)
    assert bench.door.refusals == [(request, "duplicate")]
    resume(bench, request, [5], b"other")
    assert bench.door.refusals[1:] == [(request, "duplicate")]
