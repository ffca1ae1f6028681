"""The gateway's ledger without sockets: suspects and poison, output in order, resumes, and what is told to whom."""

from typing import Any

import pytest

from antiphon.actors.columns import pack, unpack
from antiphon.actors.gateway import Gateway, GatewayOptions, Output
from antiphon.actors.protocol import Accepted, Cancel, Delta, Generate, Refuse, Resume, Sampling
from antiphon.actors.requests import LAG, Entry, Quarantine
from antiphon.runtime.message import Message


class FakeDoor:
    """Takes output while ``open`` says so, and notes everything."""

    def __init__(self) -> None:
        self.taking = True
        self.told: list[bytes] = []
        self.outputs: list[Output] = []
        self.refusals: list[tuple[bytes, str]] = []

    def accepted(self, client: bytes, request: bytes, prompt: bytes, seed: int) -> bool:
        if self.taking:
            self.told.append(request)
        return self.taking

    def deliver(self, client: bytes, outputs: list[Output]) -> bool:
        if self.taking:
            self.outputs += outputs
        return self.taking

    def refused(self, client: bytes, request: bytes, kind: str, reason: str, retry_after: float) -> None:
        self.refusals.append((request, kind))


class FakeSite:
    """What a gateway needs of its place: edges, a door, and a post that notes what is told."""

    def __init__(self) -> None:
        self.instance = "gateway"
        self.edges = {"tokenizer": "tokenizer"}
        self.post = self
        self.cell = "front"
        self.where = {"gateway": "front", "tokenizer": "front", "scheduler": "step"}
        self.log = self
        self.door = FakeDoor()
        self.sent: list[Message] = []

    def plugin(self, kind: str) -> FakeDoor:
        return self.door

    def error(self, *_: object, **__: object) -> None: ...

    def tell(self, _sender: str, to: str, message: Message, _lane: int = 1) -> None:
        assert to == "tokenizer"
        self.sent.append(message)


class Bench:
    """A gateway on a fake site."""

    def __init__(self) -> None:
        self.site = FakeSite()
        self.door = self.site.door
        self.gate = Gateway(GatewayOptions(), self.site)  # type: ignore[arg-type]
        self.gate.on_peer("scheduler", "scheduler", True)

    def ask(self, number: int, client: bytes = b"c") -> bytes:
        """A request that is accepted."""
        request = bytes([number]) * 16
        self.gate.generate(client, request, None, pack([number]), False, Sampling(100), 5)
        self.gate.on_accepted(Accepted(request, pack([number])))
        return request

    def delta(self, request: bytes, index: int, ids: list[int], finish: str = "", text: str = "") -> None:
        self.gate.on_delta(Delta((request,), pack([index]), pack([0, len(ids)]), pack(ids), (text,), (finish,)))

    def sent(self) -> list[Any]:
        """What the tokenizer was told since the last look."""
        sent, self.site.sent = self.site.sent, []
        return sent

    def outputs(self) -> list[tuple[int, list[int], str, str]]:
        """What the client was sent since the last look."""
        found, self.door.outputs = self.door.outputs, []
        return [(o.index, o.ids, o.text, o.finish) for o in found]

    def die(self) -> None:
        self.gate.on_peer("scheduler", "scheduler", False)

    def live(self) -> None:
        self.gate.on_peer("scheduler", "scheduler", True)

    def only_resume(self) -> Resume:
        """The one Resume that was told since the last look."""
        (message,) = self.sent()
        assert isinstance(message, Resume)
        return message

    def pass_trial(self, request: bytes, have: int, deaths: int = 1) -> int:
        """Output of a suspect up to its acquittal; its generated ids then."""
        for i in range(LAG * deaths):
            self.delta(request, have + i, [7])
        return have + LAG * deaths


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


# ---- deaths


def test_what_comes_while_the_scheduler_is_down_waits_for_it(bench: Bench) -> None:
    bench.die()
    assert not bench.gate.ready()
    bench.ask(1)
    assert bench.sent() == []
    bench.live()
    assert len(bench.sent()) == 1
    assert bench.gate.ready()


def test_suspects_are_tried_one_at_a_time_and_then_all_go_on(bench: Bench) -> None:
    requests = [bench.ask(i) for i in (1, 2, 3)]
    bench.delta(requests[0], 0, [5, 6])
    bench.die()
    late = bench.ask(4)
    bench.sent()
    bench.live()
    assert bench.only_resume().request == requests[0]
    have = bench.pass_trial(requests[0], 2)
    assert bench.sent() == [Cancel(requests[0], "paused")]
    bench.delta(requests[0], have, [8])  # it runs on until the cancel has arrived
    assert bench.sent() == []
    bench.delta(requests[0], have + 1, [], "cancelled", "held-back text")
    assert bench.only_resume().request == requests[1]
    bench.delta(requests[1], 0, [9], "stop")  # it ends before it has passed: no suspect any more
    assert bench.only_resume().request == requests[2]
    bench.pass_trial(requests[2], 0)  # nobody is left: it may run on
    resumed = {m.request: unpack(m.ids).tolist() for m in bench.sent()}
    assert resumed[requests[0]] == [5, 6, 7, 7, 7, 7, 8]
    assert set(resumed) == {requests[0], late}
    assert "held-back text" not in "".join(text for _, _, text, _ in bench.outputs())
    assert not bench.gate.quarantine.active


@pytest.mark.parametrize("moment", ["before its first token", "while it is being paused"])
def test_one_that_is_alone_at_another_death_is_poison(bench: Bench, moment: str) -> None:
    requests = [bench.ask(i) for i in (1, 2)]
    bench.die()
    bench.live()
    if moment == "while it is being paused":
        bench.pass_trial(requests[0], 0)
    bench.die()
    assert bench.door.refusals == [(requests[0], "poison")]
    bench.sent()
    bench.live()
    assert bench.only_resume().request == requests[1]


def test_those_who_waited_go_on_when_the_last_suspect_was_the_poison(bench: Bench) -> None:
    requests = [bench.ask(i) for i in (1, 2)]
    bench.die()
    bench.live()
    have = bench.pass_trial(requests[0], 0)
    bench.delta(requests[0], have, [], "cancelled")
    bench.die()
    assert bench.door.refusals == [(requests[1], "poison")]
    bench.sent()
    bench.live()
    assert bench.only_resume().request == requests[0]
    assert not bench.gate.quarantine.active


def test_a_finished_request_that_nobody_takes_does_not_hide_the_poison(bench: Bench) -> None:
    done, poison = bench.ask(1), bench.ask(2)
    bench.door.taking = False
    bench.delta(done, 0, [5], "stop")
    bench.die()
    assert bench.gate.quarantine.suspects == [bench.gate.entries[poison]]
    bench.live()
    bench.die()
    assert bench.door.refusals == [(poison, "poison")]


def test_a_suspect_that_is_cancelled_or_whose_client_is_gone_holds_nobody_up(bench: Bench) -> None:
    requests = [bench.ask(1), bench.ask(2), bench.ask(3, b"gone"), bench.ask(4)]
    bench.die()
    bench.live()
    bench.sent()
    bench.gate.cancel(b"c", requests[1])  # it waits for its trial: nobody else has it
    bench.gate.cancel(b"c", requests[0])  # it is being tried
    assert bench.sent() == [Cancel(requests[0])]
    bench.delta(requests[0], 0, [], "cancelled")
    assert bench.only_resume().request == requests[2]
    bench.gate.gone(b"gone")
    cancel, resumed = bench.sent()
    assert cancel == Cancel(requests[2])
    assert resumed.request == requests[3]
    assert sorted(o[3] for o in bench.outputs()) == ["cancelled", "cancelled"]


def test_what_was_cancelled_when_the_scheduler_died_ends(bench: Bench) -> None:
    request = bench.ask(1)
    bench.gate.cancel(b"c", request)
    bench.die()
    assert bench.outputs() == [(0, [], "", "cancelled")]
    assert not bench.gate.quarantine.active


def test_a_tokenizer_that_died_gets_everything_again_and_a_trial_goes_on(bench: Bench) -> None:
    requests = [bench.ask(i) for i in (1, 2)]
    bench.gate.on_peer("tokenizer", "tokenizer", False)
    bench.sent()
    bench.gate.on_peer("tokenizer", "tokenizer", True)
    assert {m.request for m in bench.sent()} == set(requests)
    bench.die()
    bench.live()
    bench.sent()
    have = bench.pass_trial(requests[0], 0)
    assert bench.sent() == [Cancel(requests[0], "paused")]
    bench.gate.on_peer("tokenizer", "tokenizer", False)  # and the cancel with it
    bench.gate.on_peer("tokenizer", "tokenizer", True)
    assert bench.only_resume().request == requests[0]
    bench.delta(requests[0], have, [7])
    assert bench.sent() == [Cancel(requests[0], "paused")]


def test_a_death_while_the_tokenizer_is_down_convicts_nobody(bench: Bench) -> None:
    requests = [bench.ask(i) for i in (1, 2)]
    bench.die()
    bench.live()
    bench.gate.on_peer("tokenizer", "tokenizer", False)
    bench.die()
    bench.gate.on_peer("tokenizer", "tokenizer", True)
    bench.sent()
    bench.live()
    assert bench.door.refusals == []
    assert bench.only_resume().request == requests[0]


def entry(number: int, ids: int = 0) -> Entry:
    made = Entry(b"c", bytes([number]) * 16, "local", Sampling(), 0)
    made.ids = [7] * ids
    return made


def test_each_death_makes_the_trial_longer() -> None:
    quarantine, suspect, other = Quarantine(), entry(1, ids=3), entry(2)
    for deaths in (1, 2, 3):
        assert quarantine.death([suspect, other]) is None
        assert quarantine.next() is suspect
        steps = 0
        while not quarantine.step(suspect):
            suspect.ids.append(7)
            steps += 1
        assert steps == LAG * deaths
        quarantine.forget(suspect)
        quarantine.next()
        quarantine.forget(other)
    assert not quarantine.active
