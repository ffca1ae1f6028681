"""The client door's wire: version, messages, limits. Append-only: new fields have defaults, names never change.

It has a version of its own, apart from the package's. It does not know sockets. Every frame is one msgpack map with
the message's name under "type"; unknown fields are ignored, so that one side may be a minor version ahead.
Token ids are packed little-endian int32.
"""

import struct
from collections.abc import Iterable

import msgspec

MAJOR, MINOR = 1, 1
MAX_FRAME = 64 << 20  # bytes
HEARTBEAT = 1.0  # seconds between a client's pings
WINDOW = 256  # Deltas frames a server may send before it needs another Grant


class Wire(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of the door's messages."""


class Hello(Wire, frozen=True):
    """client -> server, first on every connection. The version has no default: a default would not be sent."""

    major: int
    minor: int
    agent: str = ""


class Generate(Wire, frozen=True):
    """client -> server. Exactly one of ``text`` and ``ids``. ``id`` is 16 random bytes."""

    id: bytes
    text: str | None = None
    ids: bytes | None = None
    raw: bool = False
    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    priority: int = 0  # since 1.1
    cache: bool = True  # since 1.1; false: keep out of the prefix cache
    sample: int = 0  # since 1.1; number of this sample among those of a prompt and seed
    like: bytes = b""  # since 1.1; request of the same prompt whose KV this one may share


class Resume(Wire, frozen=True):
    """client -> server: go on after ``done``; the request is described as it was accepted."""

    request: Generate
    prompt: bytes = b""
    done: bytes = b""


class Cancel(Wire, frozen=True):
    """client -> server; idempotent."""

    id: bytes


class Grant(Wire, frozen=True):
    """client -> server: ``frames`` more Deltas may come."""

    frames: int


class Ping(Wire, frozen=True):
    """client -> server while the client lives."""


class Query(Wire, frozen=True):
    """client -> server: ``what`` is "stats" or "health"."""

    id: bytes
    what: str


class Survey(Wire, frozen=True):
    """client -> server, since 1.1: what is in KV memory, with the ``top`` prefixes by hits?"""

    id: bytes
    top: int = 10


class Flush(Wire, frozen=True):
    """client -> server, since 1.1: forget all cached KV blocks that nobody holds."""

    id: bytes


class Pin(Wire, frozen=True):
    """client -> server, since 1.1: keep what is cached of a prompt. Exactly one of ``text`` and ``ids``."""

    id: bytes
    text: str | None = None
    ids: bytes | None = None
    raw: bool = False
    seconds: float = 3600.0


class Unpin(Wire, frozen=True):
    """client -> server, since 1.1: let a pin go."""

    id: bytes
    pin: int


class Welcome(Wire, frozen=True):
    """server -> client, answers Hello: credit and counts begin anew. ``epoch`` changes when the door restarts."""

    epoch: int
    major: int
    minor: int
    server: str = ""


class Accepted(Wire, frozen=True):
    """server -> client: the prompt's ids and the effective seed; enough to resume elsewhere."""

    id: bytes
    prompt: bytes
    seed: int


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """New output of one request. ``index``: ids generated before the first one here."""

    id: bytes
    index: int
    ids: bytes = b""
    text: str = ""
    finish: str = ""  # "", "stop", "length", "cancelled", "error"


class Deltas(Wire, frozen=True):
    """server -> client: uses up one granted frame."""

    deltas: tuple[Delta, ...]


class Refused(Wire, frozen=True):
    """server -> client: the request is not served. An empty id: the frame itself was bad."""

    id: bytes
    kind: str
    reason: str
    retry_after: float = 0.0


class Pong(Wire, frozen=True):
    """server -> client, answers Ping; ``known`` false: the server has never seen this client, say Hello.

    ``frames``: frames sent since Welcome, Pongs left out. A client that got fewer has lost some with a connection and
    says Hello too. -1: the server does not count.
    """

    epoch: int
    known: bool = True
    frames: int = -1


class Answer(Wire, frozen=True):
    """server -> client, answers Query, Survey, Flush, Pin and Unpin."""

    id: bytes
    facts: dict[str, object]


Asked = Query | Survey | Flush | Pin | Unpin  # what is answered by Answer or Refused
FromClient = Hello | Generate | Resume | Cancel | Grant | Ping | Asked
FromServer = Welcome | Accepted | Deltas | Refused | Pong | Answer

encode = msgspec.msgpack.Encoder().encode
decode_from_client = msgspec.msgpack.Decoder(FromClient).decode
decode_from_server = msgspec.msgpack.Decoder(FromServer).decode


def pack(ids: Iterable[int]) -> bytes:
    """Token ids as packed int32. Raises struct.error: an id does not fit."""
    values = list(ids)
    return struct.pack(f"<{len(values)}i", *values)


def unpack(column: bytes) -> list[int]:
    """Packed int32 as token ids. Raises struct.error: not a multiple of four bytes."""
    return list(struct.unpack(f"<{len(column) // 4}i", column))
