"""What a client gets for a request, and what it remembers of one that is open.

It does not know connections.
"""

import asyncio
import time

import msgspec

from antiphon.plugins.doors import wire
from antiphon.plugins.doors.errors import AntiphonError


class Delta(msgspec.Struct, frozen=True):
    """New output. ``finish_reason`` is "" until the last one: "stop", "length", "cancelled" or "error"."""

    text: str
    ids: list[int]
    index: int  # ids generated before these
    finish_reason: str = ""


class Completion(msgspec.Struct, frozen=True):
    """A whole answer. Times in seconds; ``decode_tok_s`` counts the tokens after the first."""

    text: str
    ids: list[int]
    finish_reason: str
    prompt_ids: list[int]
    seed: int
    ttft_s: float
    total_s: float
    decode_tok_s: float


class Pin(msgspec.Struct, frozen=True):
    """A prefix that is kept: its number for ``unpin``, and how many of the prompt's tokens are kept."""

    number: int
    slots: int


class Open:
    """A request as the client remembers it: enough to resume it at another incarnation of the server."""

    def __init__(self, message: wire.Generate):
        self.message = message
        self.prompt: bytes | None = None  # set once accepted
        self.ids: list[int] = []
        self.queue: asyncio.Queue[Delta | AntiphonError] = asyncio.Queue()
        self.began = time.perf_counter()
        self.first = 0.0
        self.last = 0.0
        self.asked_again = 0.0  # monotonic second

    def again(self) -> wire.FromClient:
        """What to send to a server that does not know the request, or whose answers were lost."""
        if self.prompt is None:
            return self.message
        return wire.Resume(self.message, self.prompt, wire.pack(self.ids))
