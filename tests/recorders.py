"""Actors that remember what they hear, between posts inside a test's own loop.

It does not know what is tested.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import zmq

from antiphon.runtime import log
from antiphon.runtime.actor import Actor, ActorSite, Runner
from antiphon.runtime.link import Inbox
from antiphon.runtime.message import Buffer, Message
from antiphon.runtime.plugin import Options
from antiphon.runtime.post import Peer, Post


class Note(Message, frozen=True):
    """Remember it."""

    text: str


class Urge(Message, frozen=True):
    """Remember it before what waits."""

    text: str


class Echoed(Message, frozen=True):
    """Answers Echo."""

    text: str
    data: Buffer | None = None


class Echo(Message, frozen=True):
    """Send it back: at once, after ``later`` seconds, or in a way that goes wrong."""

    text: str
    data: Buffer | None = None
    later: float = 0.0
    wrong: str = ""  # "raise", "type", "none", "unsendable", "late raise", "cancel"
    reply = Echoed


class Misfit(Message, frozen=True):
    """No probe takes it."""

    reply = Echoed


class Boom(Exception):
    """What a probe raises when told to."""


class Recorder(Actor[Options]):
    """Remembers what it hears, in order."""

    kind = "recorder"

    def __init__(self, options: Options, site: ActorSite):
        super().__init__(options, site)
        self.heard: list[str] = []
        self.inside = False
        self.forward: list[tuple[str, Message]] = []  # told, once each, in the next turn
        self.failures: list[BaseException] = []

    def turn(self, text: str) -> None:
        assert not self.inside, "two turns at once"
        self.inside = True
        self.heard.append(text)
        for to, message in self.forward:
            self.tell(to, message)
        self.forward = []
        if text == "fail":
            self.inside = False
            raise Boom(text)
        self.inside = False

    def on_note(self, message: Note) -> None:
        self.turn(message.text)

    def on_urge(self, message: Urge) -> None:
        self.turn(f"!{message.text}")

    def on_peer(self, instance: str, kind: str, up: bool) -> None:
        self.turn(f"{instance} {'up' if up else 'down'}")

    def on_echo(self, message: Echo) -> Any:
        self.turn(message.text)
        match message.wrong:
            case "raise":
                raise Boom(message.text)
            case "type":
                return Note("not an Echoed")
            case "none":
                return None
            case "unsendable":
                return Echoed(object())  # type: ignore[arg-type]
        if not message.later:
            return Echoed(message.text, message.data)
        future: asyncio.Future[Echoed] = asyncio.get_running_loop().create_future()

        def answer() -> None:
            if message.wrong == "late raise":
                future.set_exception(Boom(message.text))
            elif message.wrong == "cancel":
                future.cancel()
            elif message.wrong == "late type":
                future.set_result(Note("not an Echoed"))  # type: ignore[arg-type]
            else:
                future.set_result(Echoed(message.text, message.data))

        asyncio.get_running_loop().call_later(message.later, answer)
        return future


class Side:
    """One cell's post with recorders, inside the test's loop. Addresses are inproc: give both sides one context."""

    def __init__(self, context: "zmq.Context[Any]", name: str, *instances: str, direct: bool = False, epoch: int = 1,
                 closed: bool = False):
        self.name = name
        self.peer = Peer(f"inproc://{name}-{epoch}-{id(self)}", epoch)
        self.post = Post(name, epoch, Inbox(context, [self.peer.address]), direct, log.logger())
        self.post.connect(name, self.peer)
        self.failures: list[tuple[str, BaseException]] = []
        self.actors: dict[str, Recorder] = {}
        for instance in instances:
            site = ActorSite(instance, self.post, log.logger(), {}, self._failed)
            self.actors[instance] = Recorder(Options(), site)
            self.post.host(instance, Runner(self.actors[instance], self._failed))
            if not closed:
                self.post.local[instance].open()

    def _failed(self, instance: str, cause: BaseException) -> None:
        self.failures.append((instance, cause))

    def __getitem__(self, instance: str) -> Recorder:
        return self.actors[instance]

    def knows(self, other: "Side") -> None:
        """Connect and learn where its actors are."""
        for instance in other.actors:
            self.post.where[instance] = other.name
        self.post.connect(other.name, other.peer)


class Sides:
    """Makes sides that share a context."""

    def __init__(self) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.made: list[Side] = []

    def __call__(self, name: str, *instances: str, **options: Any) -> Side:
        self.made.append(Side(self.context, name, *instances, **options))
        return self.made[-1]


@contextmanager
def sides() -> Iterator[Sides]:
    """Sides that are closed afterwards."""
    made = Sides()
    yield made
    for side in made.made:
        side.post.close()
    made.context.destroy(linger=0)


def introduce(*sides: Side) -> None:
    """Let all of them know each other."""
    for side in sides:
        for other in sides:
            if other is not side:
                side.knows(other)


async def settled(condition: Any, timeout: float = 5.0) -> None:
    """Let the loop run until ``condition()`` holds."""
    ends = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < ends, "it did not come true in time"
        await asyncio.sleep(0.002)
