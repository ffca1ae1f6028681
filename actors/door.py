"""The contract of a door: how clients reach the gateway.

It does not know any protocol; doors are plugins.
"""

from typing import TYPE_CHECKING, ClassVar

from antiphon.actors.requests import ClientKey
from antiphon.runtime.plugin import O, Plugin

if TYPE_CHECKING:
    from antiphon.actors.gateway import Gateway


class Output:
    """New output of one request for its client."""

    __slots__ = ("finish", "id", "ids", "index", "text")

    def __init__(self, request: bytes, index: int, ids: list[int], text: str, finish: str):
        self.id, self.index, self.ids, self.text, self.finish = request, index, ids, text, finish


class Door(Plugin[O]):
    """Contract of a ``door``: how clients reach the gateway. Its ``open`` gets the Gateway, whose methods it calls."""

    kind: ClassVar[str] = "door"

    async def open(self, gate: "Gateway") -> None:
        """Begin to listen."""
        raise NotImplementedError

    async def close(self) -> None:
        """Stop listening; what was sent may still leave."""
        raise NotImplementedError

    def accepted(self, client: ClientKey, request: bytes, prompt: bytes, seed: int) -> bool:
        """A request's prompt is tokenized; false: the client takes nothing now, it is told before its output."""
        raise NotImplementedError

    def deliver(self, client: ClientKey, outputs: list[Output]) -> bool:
        """Send output; false: the client takes none now and will ask with ``Gateway.flush``."""
        raise NotImplementedError

    def refused(self, client: ClientKey, request: bytes, kind: str, reason: str, retry_after: float) -> None:
        """A request will not be served."""
        raise NotImplementedError
