"""Suspects and poison: what the gateway does with its ledger when the scheduler or the tokenizer dies."""

import pytest
from tests.gates import Bench

from antiphon.actors.columns import unpack
from antiphon.actors.protocol import Cancel, Sampling
from antiphon.actors.requests import LAG, Entry, Quarantine


@pytest.fixture
def bench() -> Bench:
    return Bench()


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
    made = Entry(b"c", bytes([number]) * 16, "local", Sampling(), 0, 0)
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
