"""Messages and their encoding: typed structs in closed unions, large buffers as frames of their own.

It does not know what any message means, nor how frames travel.
"""

import hashlib
from collections.abc import Iterable
from typing import Any, ClassVar, Union, get_args

import msgspec

from antiphon.runtime.errors import BadFrame, Oversized

MAX_FRAME = 256 << 20  # bytes; the receiving socket drops the connection of a peer that sends more
MAX_FRAMES = 64  # of one message: header, body and up to 62 buffers
MAX_HEADER = 4096  # bytes; four names and four numbers take under 200


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """Base of all messages. ``reply`` names the type that answers it when it is asked.

    ``gc=False``: messages are trees of values; one that referred to itself would never be freed.
    """

    reply: ClassVar["type[Message] | None"] = None


class Buffer:
    """Bytes that travel as a frame of their own, without being copied into the body."""

    __slots__ = ("view",)

    def __init__(self, data: Any):
        self.view = memoryview(data).cast("B")

    def __len__(self) -> int:
        return self.view.nbytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Buffer) and self.view == other.view

    def __hash__(self) -> int:
        return hash(self.view.tobytes())


class Header(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """First frame of every message between actors: who, to whom, which incarnation, answering what."""

    sort: int  # TELL, ASK, REPLY, FAILURE, CREDIT
    target: str
    sender: str
    cell: str  # of the sender
    epoch: int  # of the sender's cell
    lane: int
    ask: int = 0  # correlation of an ask and its reply; for CREDIT the count
    target_epoch: int = 0  # of the receiver's cell as the sender knows it


TELL, ASK, REPLY, FAILURE, CREDIT = range(5)
CONTROL, DATA = range(2)


class Codec:
    """Encodes any Message; decodes only members of the closed union it was made for."""

    def __init__(self, types: Iterable[type[Message]]):
        self.types = tuple(sorted(set(types), key=lambda t: t.__name__))
        self._buffers: list[memoryview] = []
        self._frames: list[Any] = []
        self._taken = 0
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._out)
        self._decoder = msgspec.msgpack.Decoder(
            Union[self.types] if self.types else None,  # noqa: UP007
            dec_hook=self._in, ext_hook=_no_extension)

    def encode(self, message: Message) -> list[Any]:
        """Body frame followed by one frame a Buffer, not copied: their memory must not change until it is sent.

        Raises Oversized; TypeError or NotImplementedError: a field's value cannot travel.
        """
        self._buffers = []  # a list of its own for each message, because the caller keeps it
        frames = [self._encoder.encode(message), *self._buffers]
        if len(frames) >= MAX_FRAMES:
            raise Oversized(f"{type(message).__name__} has {len(frames) - 1} buffers; at most {MAX_FRAMES - 2} travel")
        for frame in frames:
            if len(frame) > MAX_FRAME:
                raise Oversized(f"{type(message).__name__} has {len(frame)} bytes; at most {MAX_FRAME} travel")
        self._buffers = []
        return frames

    def decode(self, frames: list[Any]) -> Any:
        """Inverse of ``encode``. Raises BadFrame: not a member of the union, or buffers are missing or left over."""
        self._frames, self._taken = frames, 0
        try:
            message = self._decoder.decode(frames[0])
        except (msgspec.MsgspecError, IndexError, ValueError, RecursionError, MemoryError) as cause:
            raise BadFrame(str(cause)) from cause
        finally:
            self._frames = []  # or the last large buffer would live until the next message
        if self._taken != len(frames) - 1:
            raise BadFrame(f"{len(frames) - 1} buffers came, {self._taken} belong to the message")
        return message

    def _out(self, value: Any) -> Any:
        if isinstance(value, Buffer):
            self._buffers.append(value.view)
            return len(self._buffers)
        raise NotImplementedError(f"{type(value).__name__} cannot travel in a message")

    def _in(self, kind: type, value: Any) -> Any:
        # Fields are decoded in the order in which they were encoded, so buffers come as 1, 2, 3...
        if kind is Buffer and value == self._taken + 1 < len(self._frames) and type(value) is int:
            self._taken = value
            return Buffer(self._frames[value])
        raise ValueError(f"no {kind.__name__} at frame {value!r}")


def _no_extension(code: int, data: memoryview) -> Any:
    raise ValueError(f"no message holds a msgpack extension ({code})")


def digest(types: Iterable[type[msgspec.Struct]]) -> str:
    """Hash of the messages' names, fields and types, of their replies and of the structs in their fields.

    Equal on both sides of a handshake, or they do not talk.
    """
    lines: dict[str, None] = {}

    def describe(kind: Any) -> None:
        for argument in get_args(kind):
            describe(argument)
        if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
            return
        fields = msgspec.structs.fields(kind)
        reply = getattr(kind, "reply", None)
        line = f"{kind.__qualname__}({', '.join(f'{f.encode_name}:{_name(f.type)}:{f.required}' for f in fields)})"
        if reply is not None:
            line += f" -> {reply.__qualname__}"
        if line not in lines:
            lines[line] = None
            describe(reply)
            for field in fields:
                describe(field.type)

    for kind in types:
        describe(kind)
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]


def _name(kind: Any) -> str:
    """A type without the module it stands in: a single-file plugin's module is named by the order of loading."""
    arguments = get_args(kind)
    name = getattr(kind, "__qualname__", str(kind)) if not arguments else str(getattr(kind, "__origin__", "union"))
    return f"{name}[{', '.join(map(_name, arguments))}]" if arguments else name
