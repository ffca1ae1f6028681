"""What root and cells say to each other: who is up, begin, halt, how are you, who has failed.

It does not know how either side acts on it.
"""

import msgspec

from antiphon.runtime import assembly
from antiphon.runtime.message import Header, Message, digest
from antiphon.runtime.plan import Plan
from antiphon.runtime.post import Failed, Peer

ROOT = "@root"


class CellSpec(msgspec.Struct, frozen=True):
    """What a cell's process is told on its standard input."""

    plan: Plan
    name: str
    epoch: int
    directory: str  # of the deployment's sockets, mode 0700
    root_epoch: int


class Joined(Message, frozen=True):
    """cell -> root: its sockets are bound; the digest binds cells of one deployment to the same messages."""

    cell: str
    epoch: int
    digest: str


class Started(Message, frozen=True):
    """cell -> root: all its actors run."""

    cell: str
    epoch: int


class ActorFailed(Message, frozen=True):
    """cell -> root: an actor's own failure; the cell ends after saying so."""

    cell: str
    epoch: int
    instance: str
    cause: str


class Left(Message, frozen=True):
    """cell -> root: an actor has made a file that must be gone when the deployment is."""

    path: str


class Met(Message, frozen=True):
    """Answers Meet: from now on what the cell sends reaches them."""


class Meet(Message, frozen=True):
    """root -> cell. All cells that are up: name -> address and epoch. ``degraded``: actors whose stand-ins run."""

    peers: dict[str, Peer]
    ready: tuple[str, ...]
    degraded: tuple[str, ...] = ()
    reply = Met


class Begin(Message, frozen=True):
    """root -> cell: start the actors."""


class Halted(Message, frozen=True):
    """Answers Halt: the actors have stopped, the process is about to end."""


class Halt(Message, frozen=True):
    """root -> cell: stop the actors, draining until ``deadline`` seconds from now."""

    deadline: float
    reply = Halted


class Probed(Message, frozen=True):
    """Answers Probe. By instance: seconds since the last progress if messages wait, else 0; how many wait."""

    stalled: dict[str, float]
    waiting: dict[str, int]


class Probe(Message, frozen=True):
    """root -> cell: how are you?"""

    reply = Probed


def address(directory: str, cell: str, epoch: int) -> str:
    """A cell's inbox; a new incarnation has a new one, so nothing old can reach it."""
    return f"ipc://{directory}/{cell}.{epoch:x}"


def schema(plan: Plan) -> str:
    """Digest of every message that root and cells of a deployment exchange, as this installation defines them."""
    ours = (Joined, Started, ActorFailed, Left, Meet, Begin, Halt, Probe, Failed)
    theirs = (t for instance in plan.actors for t in assembly.actor_class(plan, instance).handlers)
    return digest([*ours, *theirs, Header])
