"""What is refused, with which words; and that nobody else notices."""

import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.callers import POOL, Ask, Raw, answered, owed
from tests.harness import Server, graph, until

from antiphon.plugins.doors import wire
from antiphon.plugins.doors.errors import Refused
from antiphon.plugins.doors.llm import LLM

OTHER = Ask((1, 2, 3), 150)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with graph("actors.executor.options.context=512", "actors.executor.options.step_seconds=0.001", *POOL) as found:
        yield found


@pytest.fixture
def unharmed(llm: LLM) -> Iterator[None]:
    """Somebody else's request runs meanwhile and gets what it is owed."""
    got: list[Any] = []
    other = threading.Thread(target=lambda: got.append(llm.generate(OTHER.prompt, **OTHER.options())))
    other.start()
    yield
    other.join()
    assert answered(got[0]) == owed(OTHER)
    found = llm.stats()
    assert (found["gateway"]["open"], found["tokenizer"]["requests"], found["allocator"]["holds"]) == (0, 0, 0)


ID = bytes(range(16))
PROMPT = wire.pack((1, 2, 3))
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"id": b"short", "ids": PROMPT}, "invalid", "16 random bytes"),
    ({"id": ID}, "invalid", "either text or token ids"),
    ({"id": ID, "ids": PROMPT, "text": "both"}, "invalid", "either text or token ids"),
    ({"id": ID, "ids": b""}, "invalid", "the prompt is empty"),
    ({"id": ID, "text": ""}, "invalid", "the prompt is empty"),
    ({"id": ID, "ids": PROMPT[:-1]}, "invalid", "packed int32"),
    ({"id": ID, "ids": PROMPT, "temperature": float("nan")}, "invalid", "temperature"),
    ({"id": ID, "ids": PROMPT, "temperature": -1.0}, "invalid", "temperature"),
    ({"id": ID, "ids": PROMPT, "temperature": float("inf")}, "invalid", "temperature"),
    ({"id": ID, "ids": PROMPT, "top_p": 0.0}, "invalid", "top_p"),
    ({"id": ID, "ids": PROMPT, "top_p": float("nan")}, "invalid", "top_p"),
    ({"id": ID, "ids": PROMPT, "top_k": -1}, "invalid", "top_k"),
    ({"id": ID, "ids": PROMPT, "top_k": 1 << 31}, "invalid", "top_k"),
    ({"id": ID, "ids": PROMPT, "max_tokens": 0}, "invalid", "max_tokens"),
    ({"id": ID, "ids": PROMPT, "max_tokens": -5}, "invalid", "max_tokens"),
    ({"id": ID, "ids": PROMPT, "max_tokens": 1 << 40}, "too_long", "max_tokens"),
    ({"id": ID, "ids": PROMPT, "seed": -1}, "invalid", "seed"),
    ({"id": ID, "ids": PROMPT, "stop_ids": tuple(range(2000))}, "invalid", "stop ids"),
    ({"id": ID, "ids": wire.pack((1, -2))}, "invalid", "token ids"),
    ({"id": ID, "ids": wire.pack((1, 512))}, "invalid", "token ids must lie in 0..511"),
    ({"id": ID, "ids": wire.pack((1, 2**31 - 1))}, "invalid", "token ids"),
    ({"id": ID, "ids": wire.pack(range(400)), "max_tokens": 200}, "too_long", "context of 512"),
    ({"id": ID, "text": "long " * 200, "raw": True}, "too_long", "context of 512"),
]


@pytest.mark.usefixtures("unharmed")
def test_what_cannot_be_served_is_refused_with_kind_and_reason(llm: LLM) -> None:
    with Raw(llm.address) as raw:
        for fields, kind, words in REFUSED:
            raw.send(wire.Generate(**fields))
            answer = raw.receive()
            while isinstance(answer, wire.Accepted):  # what the model cannot do is found after tokenization
                answer = raw.receive()
            assert isinstance(answer, wire.Refused), fields
            assert (answer.id, answer.kind) == (fields["id"], kind), fields
            assert words in answer.reason


@pytest.mark.usefixtures("unharmed")
def test_a_resume_is_checked_like_a_new_request(llm: LLM) -> None:
    ask = Ask((1, 2, 3), 20)
    bad = [
        wire.Resume(wire.Generate(ID, **ask.options()), b"", b""),
        wire.Resume(wire.Generate(ID, **ask.options()), PROMPT, b"\x00"),
        wire.Resume(wire.Generate(ID, **ask.options()), PROMPT, wire.pack((-3,))),
        wire.Resume(wire.Generate(ID, **ask.options()), PROMPT, wire.pack((9999999,))),
        wire.Resume(wire.Generate(ID, **ask._replace(temperature=float("nan")).options()), PROMPT, b""),
    ]
    with Raw(llm.address) as raw:
        for message in bad:
            raw.send(message)
            answer = raw.receive()
            assert isinstance(answer, wire.Refused)
            assert answer.kind == "invalid"


@pytest.mark.usefixtures("unharmed")
def test_extremes_that_are_allowed_are_served(llm: LLM) -> None:
    extremes = [
        Ask((1,), 5, temperature=1e-30, seed=1), Ask((1,), 5, temperature=100.0, seed=(1 << 64) - 1),
        Ask((1,), 5, temperature=1.0, top_k=(1 << 31) - 1, seed=2), Ask((1,), 5, temperature=1.0, top_p=1e-300, seed=3),
        Ask((1,), 5, stop_ids=(-5, 1 << 40)),
    ]
    for ask in extremes:
        assert answered(llm.generate(ask.prompt, **ask.options())) == owed(ask)


def test_lone_surrogates_are_no_text(llm: LLM) -> None:
    with pytest.raises(Refused, match=r"invalid.*Unicode"):
        llm.generate("half of a pair: \ud800")
    with Raw(llm.address) as raw:  # and in a frame they are no frame
        raw.send(wire.encode(wire.Generate(ID, text="xyz")).replace(b"xyz", b"\xed\xa0\x80"))
        answer = raw.receive()
        assert isinstance(answer, wire.Refused)
        assert (answer.id, answer.kind) == (b"", "invalid")
        request = raw.generate(OTHER)
        assert raw.follow(request) == owed(OTHER)


def test_no_more_requests_than_the_gateway_takes() -> None:
    slow = ("actors.gateway.options.max_open=4", "actors.executor.options.step_seconds=0.002", *POOL)
    with graph(*slow) as llm, Raw(llm.address) as raw, Raw(llm.address) as late:
        ask = Ask((1, 2), 400)
        open_ones = [raw.generate(ask) for _ in range(4)]
        until(lambda: llm.stats()["gateway"]["open"] == 4, what="four are open")
        with pytest.raises(Refused, match="4 requests are open") as refusal:
            late.follow(late.generate(ask))
        assert (refusal.value.kind, refusal.value.retry_after) == ("overloaded", 1.0)
        assert raw.follow(open_ones[0]) == owed(ask)
        until(lambda: llm.stats()["gateway"]["open"] == 0, what="the others end")
        assert late.follow(late.generate(ask)) == owed(ask)


def test_no_more_requests_wait_than_the_scheduler_takes() -> None:
    slow = ("actors.scheduler.options.max_waiting=2", "actors.scheduler.options.max_running=1",
            "actors.executor.options.step_seconds=0.002", *POOL)
    with graph(*slow) as llm, Raw(llm.address) as raw:
        ask = Ask((1, 2), 50)
        first = raw.generate(ask._replace(max_tokens=400))
        raw.follow(first, until=1)
        requests = [raw.generate(ask) for _ in range(4)]
        refused, served = [], 0
        while served < 2 or len(refused) < 2:
            message = raw.receive()
            if isinstance(message, wire.Refused):
                assert message.kind == "overloaded"
                assert "wait already" in message.reason
                refused.append(message.id)
            elif isinstance(message, wire.Deltas):
                raw.send(wire.Grant(1))
                served += sum(bool(d.finish) and d.id in requests for d in message.deltas)
        assert refused == requests[2:]


@pytest.mark.parametrize("seconds", [20, 1])
def test_sigterm_lets_streams_finish_until_the_deadline(tmp_path: Path, seconds: int) -> None:
    """200 tokens of 10 ms fit into 20 s, 4000 do not fit into 1 s."""
    ask = Ask((1, 2, 3), 200 if seconds == 20 else 4000)
    settings = ("actors.executor.options.step_seconds=0.01", f"deadlines.stop='{seconds}s'", *POOL)
    with Server(tmp_path, *settings) as server, Raw(server.address) as raw, Raw(server.address) as late:
        request = raw.generate(ask)
        begun = len(raw.follow(request, until=5).ids)
        server.process.terminate()
        until(lambda: "stopping" in server.text(), what="the server begins to stop")

        def refusal() -> str:
            try:
                late.follow(late.generate(ask, secrets.token_bytes(16)), until=1)
            except Refused as refused:
                return str(refused)
            return ""

        until(lambda: "shutting_down" in refusal(), what="new requests are refused")
        if seconds == 20:
            rest = raw.follow(request, have=begun)
            assert (rest.ids, rest.finish) == (owed(ask).ids[begun:], "length")
        else:
            with pytest.raises(Refused, match="shutting_down"):
                raw.follow(request, have=begun)
        assert server.process.wait(20) == 0
        assert not list(server.sockets.iterdir())
        assert not Path(server.address.removeprefix("ipc://")).exists()
