"""A cell: one event loop, its sockets and the actors placed there, started and stopped in order.

It does not know what its actors do. Run by the root as a process, or inside a program's own thread.
"""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from antiphon.runtime import assembly, log, trace
from antiphon.runtime.actor import Actor, ActorSite, Runner
from antiphon.runtime.graph import Plan
from antiphon.runtime.link import Inbox
from antiphon.runtime.message import CONTROL, Message, digest
from antiphon.runtime.plugin import Options
from antiphon.runtime.post import Peer, Post

ROOT = "@root"
# The device thread dispatches operators in Python while the loop answers messages. With the default of 5 ms the
# loop can wait that long for the GIL at each hop; 0.2 ms bounds a hop and costs a switch per 0.2 ms at worst.
SWITCH_INTERVAL = 0.0002


class CellSpec(msgspec.Struct, frozen=True):
    """What a cell's process is told on its standard input."""

    plan: Plan
    name: str
    epoch: int
    directory: str  # of the deployment's sockets, mode 0700
    root_epoch: int


class Joined(Message, frozen=True):
    """A cell's sockets are bound; the digest binds cells of one deployment to the same messages."""

    cell: str
    epoch: int
    digest: str


class Ready(Message, frozen=True):
    """A cell's actors have started."""

    cell: str
    epoch: int


class ActorFailed(Message, frozen=True):
    """An actor's own failure: the cell ends after saying so."""

    cell: str
    epoch: int
    instance: str
    cause: str


class Noted(Message, frozen=True):
    """Answers Peers."""


class Peers(Message, frozen=True):
    """All cells that are up: name -> address and epoch."""

    peers: dict[str, Peer]
    ready: tuple[str, ...]
    reply = Noted


class Begin(Message, frozen=True):
    """Start the actors."""


class Halted(Message, frozen=True):
    """Answers Halt: the actors have stopped, the process is about to end."""


class Halt(Message, frozen=True):
    """Stop the actors, draining until ``deadline`` seconds from now."""

    deadline: float
    reply = Halted


class Health(Message, frozen=True):
    """By instance: seconds since the last progress while messages wait (0 when none do), waiting messages."""

    stalled: dict[str, float]
    waiting: dict[str, int]


class Probe(Message, frozen=True):
    """Ask a cell for its health."""

    reply = Health


def address(directory: str, cell: str, epoch: int) -> str:
    """A cell's inbox; a new incarnation has a new one, so nothing old can reach it."""
    return f"ipc://{directory}/{cell}.{epoch}"


class Agent(Actor[Options]):
    """The cell's own actor: does what the root says."""

    kind = "agent"

    def __init__(self, site: ActorSite, cell: "Cell"):
        super().__init__(Options(), site)
        self.cell = cell

    def on_peers(self, message: Peers) -> Noted:
        """Connect to new incarnations, forget dead ones, tell the actors."""
        self.cell.update(message.peers, message.ready)
        return Noted()

    def on_begin(self, message: Begin) -> None:
        """Start the actors."""
        self.spawn(self.cell.start(), "start")

    def on_halt(self, message: Halt) -> "asyncio.Future[Halted]":
        """Stop the actors."""

        async def halt() -> Halted:
            await self.cell.stop(message.deadline)
            # The reply leaves first; the process ends on the next turns of the loop.
            asyncio.get_running_loop().call_later(0.05, self.cell.halted)
            return Halted()

        return asyncio.ensure_future(halt())

    def on_probe(self, message: Probe) -> Health:
        """Report progress."""
        now = time.monotonic()
        runners = {name: r for name, r in self.cell.runners.items() if not name.startswith("@")}
        return Health({n: now - r.progress if r.waiting() else 0.0 for n, r in runners.items()},
                      {n: r.waiting() for n, r in runners.items()})


class Cell:
    """Builds, starts and stops the actors of one cell.

    ``failed`` is called with (instance, cause) when an actor fails, ``halted`` when the root has stopped the cell.
    With ``inproc`` the cell binds no address that another process could reach.
    """

    def __init__(self, spec: CellSpec, failed: Callable[[str, BaseException], None],
                 halted: Callable[[], None] = lambda: None, inproc: str = ""):
        self.spec = spec
        self.halted = halted
        self.log = log.logger(cell=spec.name)
        self.context = zmq.Context(io_threads=1)
        self.context.set(zmq.MAX_SOCKETS, 4096)
        self.runners: dict[str, Runner] = {}
        self.ready: frozenset[str] = frozenset()
        self._failed = failed
        self._services: dict[str, Any] = {}
        plan = spec.plan
        inner = f"inproc://{inproc or spec.name}"
        inbox = Inbox(self.context, [inner, *([] if inproc else [address(spec.directory, spec.name, spec.epoch)])])
        self.post = Post(spec.name, spec.epoch, inbox, plan.delivery == "direct", self.log)
        self.post.connect(spec.name, Peer(inner, spec.epoch))
        for instance, actor in plan.actors.items():
            self.post.where[instance] = actor.cell
        for name in plan.cells:
            self.post.where[f"@{name}"] = name
        self._host(f"@{spec.name}", lambda site: Agent(site, self))
        for instance in plan.cells[spec.name].actors:
            self._host(instance, lambda site, i=instance: assembly.build(plan, i, site))  # type: ignore[misc]
        self.runners[f"@{spec.name}"].open()

    def digest(self) -> str:
        """Schema digest of every message this version's actors of the plan take."""
        return digest(t for i in self.spec.plan.actors for t in assembly.actor_class(self.spec.plan, i).handlers)

    async def start(self) -> None:
        """Start the actors in order and open their mailboxes."""
        plan = self.spec.plan
        for instance in plan.cells[self.spec.name].actors:
            runner = self.runners[instance]
            began = time.monotonic()
            await asyncio.wait_for(runner.actor.start(), plan.deadlines.start)
            runner.open()
            self.log.debug("actor started", actor=instance, seconds=round(time.monotonic() - began, 3))
        if "root" in self.post.peers:
            self.post.tell(f"@{self.spec.name}", ROOT, Ready(self.spec.name, self.spec.epoch), CONTROL)

    async def stop(self, deadline: float) -> None:
        """Stop the actors, users before the used, each within what is left of ``deadline`` seconds."""
        ends = time.monotonic() + deadline
        for instance in reversed(self.spec.plan.cells[self.spec.name].actors):
            runner = self.runners[instance]
            left = max(0.1, ends - time.monotonic())
            try:
                await asyncio.wait_for(runner.actor.stop(left), left + 0.5)
            except TimeoutError:
                self.log.warning("actor did not stop in time", actor=instance)
            await runner.actor.site.cancel_tasks()
            runner.close()
        trace.write(self.spec.name)

    def close(self) -> None:
        """Close the sockets."""
        self.post.close()
        self.context.destroy(linger=200)

    def update(self, peers: dict[str, Peer], ready: tuple[str, ...]) -> None:
        """Take the root's list of cells; actors hear of deaths and of incarnations that became ready."""
        plan = self.spec.plan
        for cell in [c for c in self.post.peers if c not in peers and c not in ("root", self.spec.name)]:
            self.post.disconnect(cell)
        was, self.ready = self.ready, frozenset(f"{c}.{peers[c].epoch}" for c in ready if c in peers)
        for cell, peer in peers.items():
            if cell != self.spec.name:
                self.post.connect(cell, peer)
        for cell in plan.cells:
            if cell == self.spec.name:
                continue
            before = {key for key in was if key.rpartition(".")[0] == cell}
            after = {key for key in self.ready if key.rpartition(".")[0] == cell}
            if before != after:
                for up in [False] * bool(before) + [True] * bool(after):
                    self._tell_actors(cell, up)

    def _tell_actors(self, cell: str, up: bool) -> None:
        for name, runner in self.runners.items():
            if not name.startswith("@"):
                for instance in self.spec.plan.cells[cell].actors:
                    runner.actor.on_peer(instance, self.spec.plan.actors[instance].kind, up)

    def _host(self, instance: str, make: Callable[[ActorSite], Actor[Any]]) -> None:
        actor_plan = self.spec.plan.actors.get(instance)
        site = ActorSite(instance, self.post, self.log.bind(actor=instance),
                         dict(actor_plan.edges) if actor_plan else {}, self._failed)
        site.services = self._services
        actor = make(site)
        runner = self.runners[instance] = Runner(actor, self._failed)
        self.post.host(instance, runner)


async def run(spec: CellSpec) -> int:
    """A cell's process: join the root, do what it says, end when it says or when an actor fails."""
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    me = f"@{spec.name}"

    def end(code: int) -> None:
        if not ended.done():
            ended.set_result(code)

    def failed(instance: str, cause: BaseException) -> None:
        if not ended.done():
            cell.log.error("actor failed", actor=instance, cause=repr(cause))
            cell.post.tell(me, ROOT, ActorFailed(spec.name, spec.epoch, instance, repr(cause)), CONTROL)
            end(70)

    cell = Cell(spec, failed, halted=lambda: end(0))
    cell.post.where[ROOT] = "root"
    cell.post.connect("root", Peer(address(spec.directory, "root", spec.root_epoch), spec.root_epoch))
    cell.post.tell(me, ROOT, Joined(spec.name, spec.epoch, cell.digest()), CONTROL)
    code = await ended
    await asyncio.sleep(0.02 if code else 0)
    cell.close()
    return code


def main() -> int:
    """Entry of a cell's process: the specification is the first line of standard input.

    Standard input stays open as long as the root lives. When it ends, the root is dead and so are we.
    """
    import gc
    import signal

    import uvloop

    line = sys.stdin.buffer.readline()
    spec = msgspec.json.decode(line, type=CellSpec)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the root decides when to stop
    threading.Thread(target=_watch_root, args=(spec.directory,), daemon=True).start()
    options = spec.plan.log
    log.configure(options.level, options.format, options.prompts)
    sys.setswitchinterval(SWITCH_INTERVAL)
    gc.set_threshold(50_000, 20, 20)  # messages are gc-free structs; frequent young collections only add jitter
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(spec))


def _watch_root(directory: str) -> None:
    # A thread, so that a loop that is busy or stuck does not outlive the root.
    try:
        while os.read(0, 4096):
            pass
    finally:
        import shutil

        shutil.rmtree(Path(directory), ignore_errors=True)
        os._exit(71)


if __name__ == "__main__":
    sys.exit(main())
