"""Resuming: a request goes on where its caller says it is, whoever ran it before, and ids belong to their client."""

from collections.abc import Iterator

import pytest
from tests.callers import POOL, Ask, Raw, answered, owed, text_of
from tests.harness import DELIVERIES, graph, until

from antiphon.plugins.doors import wire
from antiphon.plugins.doors.errors import Refused
from antiphon.plugins.doors.llm import LLM

ID = bytes(range(16))
ASK = Ask((1, 2, 3), 80, temperature=0.9, top_k=50, seed=5)
IDS = owed(ASK).ids


@pytest.fixture(scope="module", params=DELIVERIES)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    slow = "actors.executor.options.step_seconds=0.003"
    with graph(f"delivery={request.param!r}", slow, "actors.gateway.options.client_grace=3.0", *POOL) as found:
        yield found
        settled(found)


def settled(llm: LLM) -> None:
    """Nothing is open, held or running any more."""

    def nothing() -> bool:
        found = llm.stats()
        return (found["gateway"]["open"], found["tokenizer"]["requests"], found["scheduler"]["running"],
                found["scheduler"]["waiting"], found["allocator"]["holds"]) == (0, 0, 0, 0, 0)

    until(nothing, what="everything has ended")


def rest(done: int) -> tuple[list[int], str, str]:
    """What must come after ``done`` generated ids."""
    return IDS[done:], "length", text_of((*ASK.prompt, *IDS[:done]), IDS[done:])


@pytest.mark.parametrize("back", [0, 3, 10, 20])
def test_a_running_request_is_sent_again_from_where_the_client_says(llm: LLM, back: int) -> None:
    with Raw(llm.address) as raw:
        raw.generate(ASK, ID)
        have = len(raw.follow(ID, until=20).ids)
        raw.resume(ID, ASK, IDS[:have - back])
        assert raw.follow(ID, have=have - back) == rest(have - back)
    settled(llm)


def test_resumes_in_quick_succession_to_earlier_and_later_places(llm: LLM) -> None:
    with Raw(llm.address) as raw:
        raw.generate(ASK, ID)
        have = len(raw.follow(ID, until=25).ids)
        for done in (5, 20, 0, 12, have, 7):
            raw.resume(ID, ASK, IDS[:done])
        got = raw.follow(ID, have=7)
        assert (got.ids, got.finish) == (IDS[7:], "length")
    settled(llm)


@pytest.mark.parametrize("done", [0, 1, 40, 79])
def test_an_unknown_request_is_computed_from_what_the_client_has(llm: LLM, done: int) -> None:
    with Raw(llm.address) as raw:
        raw.resume(ID, ASK, IDS[:done])
        assert raw.follow(ID, have=done) == rest(done)
    settled(llm)


def test_a_request_that_was_complete_ends_at_once(llm: LLM) -> None:
    stopped = ASK._replace(stop_ids=(IDS[9],))
    with Raw(llm.address) as raw:
        raw.resume(ID, ASK, IDS)
        assert raw.follow(ID, have=80) == ([], "length", "")
        raw.resume(ID, stopped, IDS[:10])
        assert raw.follow(ID, have=10) == ([], "stop", "")


def test_a_request_whose_client_is_silent_is_cancelled_and_can_be_resumed(llm: LLM) -> None:
    endless = ASK._replace(max_tokens=3000)
    identity = b"c-sleeper"
    raw = Raw(llm.address, identity)
    raw.generate(endless, ID)
    have = len(raw.follow(ID, until=10).ids)
    settled(llm)
    raw.send(wire.Ping())
    pong = raw.receive()
    while not isinstance(pong, wire.Pong):
        pong = raw.receive()
    assert not pong.known
    raw.send(wire.Hello(wire.MAJOR, wire.MINOR))
    raw.resume(ID, ASK, IDS[:have])
    assert raw.follow(ID, have=have) == rest(have)
    raw.close()


def test_an_id_belongs_to_the_client_that_drew_it(llm: LLM) -> None:
    with Raw(llm.address) as owner, Raw(llm.address) as thief:
        owner.generate(ASK, ID)
        have = len(owner.follow(ID, until=5).ids)
        thief.resume(ID, ASK, IDS[:2])
        with pytest.raises(Refused, match="duplicate"):
            thief.follow(ID)
        with pytest.raises(Refused, match="duplicate"):
            thief.follow(thief.generate(ASK, ID))
        thief.send(wire.Cancel(ID))
        assert owner.follow(ID, have=have) == rest(have)


def test_an_id_in_use_is_refused_for_another_request_and_repeated_for_the_same(llm: LLM) -> None:
    with Raw(llm.address) as raw:
        raw.generate(ASK, ID)
        raw.follow(ID, until=6)
        raw.generate(ASK._replace(max_tokens=7), ID)
        with pytest.raises(Refused, match="duplicate"):
            raw.follow(ID, have=1000)
        raw.generate(ASK, ID)  # a frame that came twice, from a client that had no answer yet
        while not isinstance(accepted := raw.receive(), wire.Accepted):
            pass
        assert wire.unpack(accepted.prompt) == [1, 2, 3]
        assert raw.follow(ID) == rest(0)
        raw.generate(ASK._replace(max_tokens=7), ID)  # the id is free again
        assert raw.follow(ID).ids == IDS[:7]


def test_a_cancel_reaches_a_request_in_every_state(llm: LLM) -> None:
    long_text = "words " * 100_000  # encoded on a worker thread
    with Raw(llm.address) as raw:
        for generated in (None, 0, 1, 10):
            for text in (False, True):
                if text:
                    raw.send(wire.Generate(ID, text=long_text, raw=True, max_tokens=5))
                else:
                    raw.generate(ASK, ID)
                if generated is not None and not text:
                    raw.follow(ID, until=generated or 1)
                raw.send(wire.Cancel(ID))
                raw.send(wire.Cancel(ID))
                ended = False
                while not ended:
                    message = raw.receive()
                    if isinstance(message, wire.Deltas):
                        raw.send(wire.Grant(1))
                        ended = any(d.finish in ("cancelled", "length") for d in message.deltas)
                    elif isinstance(message, wire.Refused):  # the long text may have been too long sooner
                        assert text
                        assert message.kind == "too_long"
                        ended = True
    settled(llm)


def test_a_cancelled_id_can_be_used_again_at_once(llm: LLM) -> None:
    with Raw(llm.address) as raw:
        for _ in range(5):
            raw.generate(ASK, ID)
            raw.send(wire.Cancel(ID))
            while not (isinstance(m := raw.receive(), wire.Deltas) and any(d.finish for d in m.deltas)):
                pass
            raw.resume(ID, ASK, IDS[:70])
            assert raw.follow(ID, have=70) == rest(70)
    assert answered(llm.generate(ASK.prompt, **ASK.options())) == owed(ASK)
