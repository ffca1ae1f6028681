"""Messages on the wire: what is encoded comes back, and nothing else comes through."""

import asyncio
import random
import string
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.runtime import message as wire
from antiphon.runtime.errors import BadFrame, Oversized
from antiphon.runtime.message import MAX_FRAMES, Buffer, Codec, Header, Message, digest


class Inner(msgspec.Struct, frozen=True):
    number: int
    blob: Buffer


class Carried(Message, frozen=True):
    numbers: bytes
    name: str
    first: Buffer | None = None
    more: tuple[Buffer, ...] = ()
    inner: Inner | None = None


class Plain(Message, frozen=True):
    value: int


class Loose(Message, frozen=True):
    facts: dict[str, Any]


CODEC = Codec([Carried, Plain, Loose])


@given(st.binary(max_size=64), st.text(max_size=16), st.lists(st.binary(max_size=300), max_size=5))
@settings(max_examples=100, deadline=None)
def test_a_message_comes_back_with_its_buffers(numbers: bytes, name: str, blobs: list[bytes]) -> None:
    sent = Carried(numbers, name, Buffer(b"first"), tuple(map(Buffer, blobs)), Inner(7, Buffer(b"in")))
    frames = CODEC.encode(sent)
    assert len(frames) == 1 + 1 + len(blobs) + 1
    assert CODEC.decode(frames) == sent


def test_buffers_are_neither_copied_out_nor_in() -> None:
    memory = bytearray(b"x" * 100_000)
    frames = CODEC.encode(Carried(b"", "", Buffer(memory)))
    assert len(frames[0]) < 100
    memory[0] = ord("y")
    assert bytes(frames[1][:1]) == b"y", "the frame is the sender's memory"
    received = CODEC.decode(frames)
    memory[1] = ord("z")
    assert bytes(received.first.view[:2]) == b"yz", "the receiver's buffer is the frame's memory"


def test_a_codec_keeps_no_buffer_alive() -> None:
    memory = bytearray(10)
    decoded = CODEC.decode(CODEC.encode(Carried(b"", "", Buffer(memory))))
    del decoded
    memory.extend(b"a bytearray that is still viewed cannot grow")


def test_frames_of_one_message_survive_the_next() -> None:
    one = CODEC.encode(Carried(b"", "one", Buffer(b"1")))
    two = CODEC.encode(Carried(b"", "two", Buffer(b"2")))
    assert (CODEC.decode(one).first, CODEC.decode(two).first) == (Buffer(b"1"), Buffer(b"2"))


def body(*fields: object) -> bytes:
    return msgspec.msgpack.encode(fields)


BAD = {
    "nothing": [b""],
    "no frames": [],
    "a foreign message": [body("Foreign", 1)],
    "a member of another union": [body("Halt", 1.0)],
    "a wrong type": [body("Plain", "seven")],
    "a missing field": [body("Plain")],
    "a field too many": [body("Plain", 7, 8)],
    "no tag": [body(7)],
    "a map": [msgspec.msgpack.encode({"type": "Plain", "value": 7})],
    "something behind it": [body("Plain", 7) + b"\x00"],
    "a missing buffer": [body("Carried", b"", "", 1)],
    "a buffer left over": [body("Plain", 7), b"extra"],
    "one buffer taken twice": [body("Carried", b"", "", 1, [1]), b"one"],
    "buffers out of order": [body("Carried", b"", "", 2, [1]), b"one", b"two"],
    "the body as a buffer": [body("Carried", b"", "", 0), b"one"],
    "true as a buffer": [body("Carried", b"", "", True), b"one"],
    "a negative buffer": [body("Carried", b"", "", -1), b"one"],
    "bad utf-8": [b"\x93\xa7Carried\xc4\x00\xa1\xff"],
    "an array of four billion": [b"\x92\xa5Loose\x81\xa1a\xdd\xff\xff\xff\xff"],
    "a map of four billion": [b"\x92\xa5Loose\xdf\xff\xff\xff\xff"],
    "bytes of four billion": [b"\x93\xa7Carried\xc6\xff\xff\xff\xff"],
    "a deep nest": [b"\x92\xa5Loose\x81\xa1a" + b"\x91" * 100_000 + b"\x01"],
    "an extension": [b"\x92\xa5Loose\x81\xa1a\xc7\x02\x05ab"],
}


@pytest.mark.parametrize("case", BAD)
def test_whatever_is_wrong_is_a_bad_frame(case: str) -> None:
    with pytest.raises(BadFrame):
        CODEC.decode(BAD[case])
    assert CODEC.decode(CODEC.encode(Plain(7))) == Plain(7), "the codec is none the worse for it"


def test_random_bytes_are_bad_frames() -> None:
    rng = random.Random(1)
    header = msgspec.msgpack.Decoder(Header)
    good = CODEC.encode(Carried(b"1234", "name", Buffer(b"blob")))
    for _ in range(20_000):
        if rng.random() < 0.5:
            frames = [rng.randbytes(rng.randrange(40)) for _ in range(rng.randrange(1, 4))]
        else:  # a good one, damaged
            damaged = bytearray(good[0])
            for _ in range(rng.randrange(1, 4)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            frames = [bytes(damaged), good[1]]
        try:
            found = CODEC.decode(frames)
        except BadFrame:
            continue
        assert type(found) in CODEC.types
    for _ in range(5_000):
        try:
            header.decode(rng.randbytes(rng.randrange(60)))
        except (msgspec.MsgspecError, ValueError):
            continue


def test_a_union_of_no_types_takes_nothing() -> None:
    with pytest.raises(BadFrame):
        Codec(()).decode(CODEC.encode(Plain(1)))


def test_more_or_longer_frames_than_travel_are_refused_at_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = Carried(b"", "", None, tuple(Buffer(b"") for _ in range(MAX_FRAMES - 2)))
    assert len(CODEC.encode(fit)) == MAX_FRAMES - 1
    with pytest.raises(Oversized, match="63 buffers; at most 62"):
        CODEC.encode(Carried(b"", "", None, tuple(Buffer(b"") for _ in range(MAX_FRAMES - 1))))
    monkeypatch.setattr(wire, "MAX_FRAME", 1000)
    CODEC.encode(Carried(b"x" * 900, ""))
    for message in (Carried(b"x" * 1000, ""), Carried(b"", "", Buffer(b"x" * 1001))):
        with pytest.raises(Oversized, match="at most 1000"):
            CODEC.encode(message)


def test_values_that_are_no_data_do_not_travel() -> None:
    for value in (object(), asyncio.Event, print):
        with pytest.raises((TypeError, NotImplementedError)):
            CODEC.encode(Loose({"a": value}))


def test_messages_do_not_change() -> None:
    with pytest.raises(AttributeError):
        Plain(1).value = 2  # type: ignore[misc]


def make(name: str, reply: type[Message] | None = None, **fields: object) -> type[Message]:
    kind = msgspec.defstruct(name, list(fields.items()), bases=(Message,), frozen=True)
    kind.reply = reply  # type: ignore[attr-defined]
    return kind


def test_the_digest_sees_every_change_that_the_wire_sees() -> None:
    inner = msgspec.defstruct("Inside", [("x", int)], frozen=True)
    wider = msgspec.defstruct("Inside", [("x", int), ("y", int, 0)], frozen=True)
    answer, other_answer = make("Answered", text=str), make("Answered", text=bytes)
    schemas = [
        [make("Ask", x=int)],
        [make("Ask", y=int)],
        [make("Ask", x=float)],
        [make("Ask", x=list[int])],
        [make("Ask", x=tuple[int, ...])],
        [make("Ask", x=int | None)],
        [make("Ask", x=int, y=int)],
        [make("Asked", x=int)],
        [make("Ask", x=int), make("Tell", x=int)],
        [make("Ask", answer, x=int)],
        [make("Ask", other_answer, x=int)],
        [make("Ask", x=inner)],
        [make("Ask", x=wider)],
        [make("Ask", x=dict[str, tuple[inner, ...]])],
        [make("Ask", x=dict[str, tuple[wider, ...]])],
    ]
    digests = [digest(schema) for schema in schemas]
    assert len(set(digests)) == len(digests)


def test_the_digest_depends_on_neither_order_nor_module() -> None:
    one, two = make("One", x=int), make("Two", x=int)
    moved = msgspec.defstruct("One", [("x", int)], bases=(Message,), frozen=True, module="elsewhere")
    assert digest([one, two]) == digest([two, one]) == digest([two, moved, two])
    assert set(digest([one])) <= set(string.hexdigits)


def test_a_struct_that_holds_itself_has_a_digest() -> None:
    class Tree(Message, frozen=True):
        children: "tuple[Tree, ...]" = ()

    globals()["Tree"] = Tree
    assert digest([Tree])
