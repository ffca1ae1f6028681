"""A gateway without sockets: a door that remembers, a post that records what is told to whom.

It does not know what is tested.
"""

from typing import Any

from antiphon.actors.columns import pack
from antiphon.actors.gateway import Gateway, GatewayOptions, Output
from antiphon.actors.protocol import Accepted, Delta, Resume, Sampling
from antiphon.actors.requests import LAG
from antiphon.runtime.message import Message


class FakeDoor:
    """Takes output while ``open`` says so, and notes everything."""

    def __init__(self) -> None:
        self.taking = True
        self.told: list[bytes] = []
        self.outputs: list[Output] = []
        self.refusals: list[tuple[bytes, str]] = []

    def accepted(self, client: bytes, request: bytes, prompt: bytes, seed: int) -> bool:
        if self.taking:
            self.told.append(request)
        return self.taking

    def deliver(self, client: bytes, outputs: list[Output]) -> bool:
        if self.taking:
            self.outputs += outputs
        return self.taking

    def refused(self, client: bytes, request: bytes, kind: str, reason: str, retry_after: float) -> None:
        self.refusals.append((request, kind))


class FakeSite:
    """What a gateway needs of its place: edges, a door, and a post that notes what is told."""

    def __init__(self) -> None:
        self.instance = "gateway"
        self.edges = {"tokenizer": "tokenizer"}
        self.post = self
        self.cell = "front"
        self.where = {"gateway": "front", "tokenizer": "front", "scheduler": "step"}
        self.log = self
        self.door = FakeDoor()
        self.sent: list[Message] = []

    def plugin(self, kind: str) -> FakeDoor:
        return self.door

    def error(self, *_: object, **__: object) -> None: ...

    def tell(self, _sender: str, to: str, message: Message, _lane: int = 1) -> None:
        assert to == "tokenizer"
        self.sent.append(message)


class Bench:
    """A gateway on a fake site."""

    def __init__(self) -> None:
        self.site = FakeSite()
        self.door = self.site.door
        self.gate = Gateway(GatewayOptions(), self.site)  # type: ignore[arg-type]
        self.gate.on_peer("scheduler", "scheduler", True)

    def ask(self, number: int, client: bytes = b"c") -> bytes:
        """A request that is accepted."""
        request = bytes([number]) * 16
        self.gate.generate(client, request, None, pack([number]), False, Sampling(100), 5)
        self.gate.on_accepted(Accepted(request, pack([number])))
        return request

    def delta(self, request: bytes, index: int, ids: list[int], finish: str = "", text: str = "") -> None:
        self.gate.on_delta(Delta((request,), pack([index]), pack([0, len(ids)]), pack(ids), (text,), (finish,)))

    def sent(self) -> list[Any]:
        """What the tokenizer was told since the last look."""
        sent, self.site.sent = self.site.sent, []
        return sent

    def outputs(self) -> list[tuple[int, list[int], str, str]]:
        """What the client was sent since the last look."""
        found, self.door.outputs = self.door.outputs, []
        return [(o.index, o.ids, o.text, o.finish) for o in found]

    def die(self) -> None:
        self.gate.on_peer("scheduler", "scheduler", False)

    def live(self) -> None:
        self.gate.on_peer("scheduler", "scheduler", True)

    def only_resume(self) -> Resume:
        """The one Resume that was told since the last look."""
        (message,) = self.sent()
        assert isinstance(message, Resume)
        return message

    def pass_trial(self, request: bytes, have: int, deaths: int = 1) -> int:
        """Output of a suspect up to its acquittal; its generated ids then."""
        for i in range(LAG * deaths):
            self.delta(request, have + i, [7])
        return have + LAG * deaths
