"""Golden frames of the client door: what any version ever sent must decode, byte for byte as written here.

Frames are added, never changed: a client in another language, or one a version older, depends on them.
"""

import msgspec
import pytest

from antiphon.plugins.doors import wire

ID = bytes(range(16))
BEGIN = "a26964c410000102030405060708090a0b0c0d0e0f"  # the field "id" with ID
FRAMES: list[tuple[wire.FromClient | wire.FromServer, str]] = [
    (wire.Hello(1, 0, "x"), "84a474797065a548656c6c6fa56d616a6f7201a56d696e6f7200a56167656e74a178"),
    (wire.Generate(ID, text="hi", max_tokens=5, temperature=0.5, seed=7),
     (f"86a474797065a847656e6572617465{BEGIN}a474657874a26869aa6d61785f746f6b656e7305"
      "ab74656d7065726174757265cb3fe0000000000000a47365656407")),
    (wire.Generate(ID, ids=wire.pack([1, 2, 300]), ignore_eos=True),
     f"84a474797065a847656e6572617465{BEGIN}a3696473c40c01000000020000002c010000aa69676e6f72655f656f73c3"),
    (wire.Generate(ID, text="hi", priority=-3, cache=False),
     f"85a474797065a847656e6572617465{BEGIN}a474657874a26869a87072696f72697479fda56361636865c2"),
    (wire.Resume(wire.Generate(ID, ids=wire.pack([1]), seed=3), wire.pack([1]), wire.pack([9, 8])),
     (f"84a474797065a6526573756d65a77265717565737484a474797065a847656e6572617465{BEGIN}"
      "a3696473c40401000000a47365656403a670726f6d7074c40401000000a4646f6e65c4080900000008000000")),
    (wire.Cancel(ID), f"82a474797065a643616e63656c{BEGIN}"),
    (wire.Grant(128), "82a474797065a54772616e74a66672616d6573cc80"),
    (wire.Ping(), "81a474797065a450696e67"),
    (wire.Query(b"12345678", "stats"), "83a474797065a55175657279a26964c4083132333435363738a477686174a57374617473"),
    (wire.Survey(b"12345678", 5), "83a474797065a6537572766579a26964c4083132333435363738a3746f7005"),
    (wire.Flush(b"12345678"), "82a474797065a5466c757368a26964c4083132333435363738"),
    (wire.Pin(b"12345678", text="hi", raw=True, seconds=60.0),
     ("85a474797065a350696ea26964c4083132333435363738a474657874a26869a3726177c3"
      "a77365636f6e6473cb404e000000000000")),
    (wire.Pin(b"12345678", ids=wire.pack([1])), "83a474797065a350696ea26964c4083132333435363738a3696473c40401000000"),
    (wire.Unpin(b"12345678", 3), "83a474797065a5556e70696ea26964c4083132333435363738a370696e03"),
    (wire.Welcome(5, 1, 0, "antiphon"),
     "85a474797065a757656c636f6d65a565706f636805a56d616a6f7201a56d696e6f7200a6736572766572a8616e746970686f6e"),
    (wire.Accepted(ID, wire.pack([4]), 1 << 63),
     f"84a474797065a84163636570746564{BEGIN}a670726f6d7074c40404000000a473656564cf8000000000000000"),
    (wire.Deltas((wire.Delta(ID, 0, wire.pack([65]), "A"), wire.Delta(ID, 1, finish="stop"))),
     (f"82a474797065a644656c746173a664656c7461739284{BEGIN}a5696e64657800a3696473c40441000000a474657874a141"
      f"83{BEGIN}a5696e64657801a666696e697368a473746f70")),
    (wire.Refused(ID, "overloaded", "full", 1.0),
     (f"85a474797065a752656675736564{BEGIN}a46b696e64aa6f7665726c6f61646564a6726561736f6ea466756c6c"
      "ab72657472795f6166746572cb3ff0000000000000")),
    (wire.Pong(5), "82a474797065a4506f6e67a565706f636805"),
    (wire.Answer(b"12345678", {"ready": True}),
     "83a474797065a6416e73776572a26964c4083132333435363738a5666163747381a57265616479c3"),
]


@pytest.mark.parametrize(("message", "frame"), FRAMES, ids=lambda v: type(v).__name__)
def test_a_golden_frame_decodes_and_encodes_as_ever(message: wire.FromClient | wire.FromServer, frame: str) -> None:
    raw = bytes.fromhex(frame)
    decode = wire.decode_from_client if isinstance(message, wire.FromClient) else wire.decode_from_server
    assert decode(raw) == message
    # Not byte for byte: how a map's length is written depends on how many fields its message may have.
    assert msgspec.msgpack.decode(wire.encode(message)) == msgspec.msgpack.decode(raw)


def test_a_newer_side_s_fields_are_ignored() -> None:
    newer = msgspec.msgpack.encode({"type": "Pong", "epoch": 3, "mood": "sunny"})
    assert wire.decode_from_server(newer) == wire.Pong(3)


def test_every_message_of_the_door_has_a_golden_frame() -> None:
    named = {type(message) for message, _ in FRAMES}
    assert named == set(wire.FromClient.__args__) | set(wire.FromServer.__args__)
