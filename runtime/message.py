"""Messages and their encoding: typed structs in closed unions, large buffers as frames of their own.

It does not know what any message means, nor how frames travel.
"""

import hashlib
from collections.abc import Iterable
from typing import Any, ClassVar, Union

import msgspec

from antiphon.runtime.errors import BadFrame

MAX_FRAME = 256 << 20  # bytes; larger frames are refused by the sockets themselves
MAX_FRAMES = 64


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of all messages. ``reply`` names the type that answers it when it is asked."""

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
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._out)
        self._decoder = msgspec.msgpack.Decoder(Union[self.types] if self.types else None, dec_hook=self._in)  # type: ignore[arg-type]  # noqa: UP007

    def encode(self, message: Message) -> list[Any]:
        """Body frame followed by one frame a Buffer."""
        self._buffers = []
        return [self._encoder.encode(message), *self._buffers]

    def decode(self, frames: list[Any]) -> Any:
        """Inverse of ``encode``. Raises BadFrame: not a member of the union, or a buffer is missing."""
        self._frames = frames
        try:
            return self._decoder.decode(frames[0])
        except (msgspec.MsgspecError, IndexError, ValueError, RecursionError) as cause:
            raise BadFrame(str(cause)) from cause

    def _out(self, value: Any) -> Any:
        if isinstance(value, Buffer):
            self._buffers.append(value.view)
            return len(self._buffers)
        raise NotImplementedError(f"{type(value).__name__} cannot travel in a message")

    def _in(self, kind: type, value: Any) -> Any:
        if kind is Buffer and isinstance(value, int) and 0 < value < len(self._frames):
            return Buffer(self._frames[value])
        raise ValueError(f"no {kind.__name__} at frame {value!r}")


def digest(types: Iterable[type[Message]]) -> str:
    """Hash of the messages' names, fields and types: equal on both sides of a handshake or they do not talk."""
    lines = sorted(
        f"{t.__name__}({', '.join(f'{f.name}:{f.type}' for f in msgspec.structs.fields(t))})" for t in set(types)
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
