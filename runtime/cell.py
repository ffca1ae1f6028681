"""A cell: one event loop, its sockets and the actors placed there, started and stopped in order.

It does not know what its actors do. Run by the root as a process, or inside a program's own thread.
"""

import asyncio
import gc
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from antiphon.runtime import assembly, log, trace
from antiphon.runtime.actor import Actor, ActorSite, Envelope, PeerNews, Runner
from antiphon.runtime.directory import remove
from antiphon.runtime.errors import CellFailed
from antiphon.runtime.link import Inbox
from antiphon.runtime.message import CONTROL, TELL, Codec, Header
from antiphon.runtime.orders import (
    ROOT,
    ActorFailed,
    Begin,
    CellSpec,
    Halt,
    Halted,
    Joined,
    Left,
    Meet,
    Met,
    Probe,
    Probed,
    Started,
    address,
    schema,
)
from antiphon.runtime.plugin import Options
from antiphon.runtime.post import Peer, Post
from antiphon.runtime.process import FAILED
from antiphon.runtime.watchdog import Watchdog

# The device thread dispatches operators in Python while the loop answers messages, and each hop wakes the loop anew:
# with the default of 5 ms it waits up to that long for the GIL, hop after hop. 0.2 ms bounds the wait of a hop, and
# a switch per 0.2 ms at worst costs the thread a few per cent; less gains nothing more. The numbers are printed by
# `pytest -m bench -s tests/behaviour/test_idle.py`.
SWITCH_INTERVAL = 0.0002
ORPHANED = 71  # exit code of a cell whose root is dead



class Agent(Actor[Options]):
    """The cell's own actor: does what the root says."""

    kind = "agent"

    def __init__(self, site: ActorSite, cell: "Cell"):
        super().__init__(Options(), site)
        self.cell = cell
        self.starting: asyncio.Task[None] | None = None

    def on_meet(self, message: Meet) -> Met:
        """Connect to new incarnations, forget dead ones, tell the actors."""
        self.cell.post.degraded = message.degraded
        self.cell.update(message.peers, message.ready)
        return Met()

    def on_begin(self, message: Begin) -> None:
        """Start the actors."""
        self.starting = self.spawn(self.cell.start(), "start")

    def on_halt(self, message: Halt) -> "asyncio.Future[Halted]":
        """Stop the actors."""
        halted: asyncio.Future[Halted] = asyncio.get_running_loop().create_future()
        self.spawn(self._halt(message.deadline, halted), "halt")
        return halted

    async def _halt(self, deadline: float, halted: "asyncio.Future[Halted]") -> None:
        if self.starting is not None:
            self.starting.cancel()
            await asyncio.gather(self.starting, return_exceptions=True)
        await self.cell.stop(deadline)
        halted.set_result(Halted())
        await asyncio.sleep(0.01)  # the reply leaves first
        self.cell.halted()

    def on_probe(self, message: Probe) -> Probed:
        """Report progress."""
        now = time.monotonic()
        runners = {name: r for name, r in self.cell.runners.items() if not name.startswith("@")}
        return Probed({n: now - r.progress if r.waiting() else 0.0 for n, r in runners.items()},
                      {n: r.waiting() for n, r in runners.items()})


class Cell:
    """Builds, starts and stops the actors of one cell: ``build``, then ``start``, then ``stop``, then ``close``.

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
        self.files: set[str] = set()  # made by actors; gone when the cell is
        self._report = failed
        self._begun: list[str] = []
        self._services: dict[str, Any] = {}
        self._watchdog: Watchdog | None = None
        inner = f"inproc://{inproc or spec.name}"
        try:
            inbox = Inbox(self.context, [inner, *([] if inproc else [address(spec.directory, spec.name, spec.epoch)])])
        except zmq.ZMQError:
            self.context.destroy(linger=0)
            raise
        self.post = Post(spec.name, spec.epoch, inbox, spec.plan.delivery == "direct", self.log)
        self.post.connect(spec.name, Peer(inner, spec.epoch))
        for instance, actor in spec.plan.actors.items():
            self.post.where[instance] = actor.cell
            self.post.kinds[instance] = actor.kind
        for name in spec.plan.cells:
            self.post.where[f"@{name}"] = name
        self._host(f"@{spec.name}", lambda site: Agent(site, self))

    def build(self) -> bool:
        """Make the actors and begin to listen to the root. False: one cannot be made, and ``failed`` knows why."""
        for instance in self.spec.plan.cells[self.spec.name].actors:
            try:
                self._host(instance, lambda site, i=instance: assembly.build(self.spec.plan, i, site))  # type: ignore[misc]
            except Exception as cause:  # noqa: BLE001 - whatever an actor's code raises, it is told to the root
                self._failed(instance, cause)
                return False
        self.runners[f"@{self.spec.name}"].open()
        return True

    async def start(self) -> None:
        """Start the actors in order and open their mailboxes. What goes wrong is told to ``failed``."""
        deadline = self.spec.plan.deadlines.start
        ends = time.monotonic() + deadline
        self._watch(deadline + 0.5)  # an actor that awaits is told first, by name
        for instance in self.spec.plan.cells[self.spec.name].actors:
            runner = self.runners[instance]
            began = time.monotonic()
            self._begun.append(instance)
            starting = asyncio.get_running_loop().create_task(runner.actor.start(), name=f"{instance}:start")
            try:
                await asyncio.wait_for(starting, max(0.001, ends - began))
            except (Exception, asyncio.CancelledError) as cause:
                task = asyncio.current_task()
                if isinstance(cause, asyncio.CancelledError) and task is not None and task.cancelling():
                    raise  # told to stop
                late = isinstance(cause, TimeoutError) and starting.cancelled()
                self._failed(instance, CellFailed(f"not started within {deadline:g} s") if late else cause)
                return
            runner.open()
            self.log.debug("actor started", actor=instance, seconds=round(time.monotonic() - began, 3))
        if "root" in self.post.peers:
            self.post.tell(f"@{self.spec.name}", ROOT, Started(self.spec.name, self.spec.epoch), CONTROL)

        self._watch(self.spec.plan.deadlines.stall)

    async def stop(self, deadline: float) -> None:
        """Stop the actors whose start began, users before the used, within what is left of ``deadline`` seconds."""
        ends = time.monotonic() + deadline
        while self._begun:
            instance = self._begun.pop()
            runner = self.runners[instance]
            left = max(0.1, ends - time.monotonic())
            try:
                await asyncio.wait_for(runner.actor.stop(left), left + 0.5)
            except TimeoutError:
                self.log.warning("actor did not stop in time", actor=instance)
            except Exception as cause:  # noqa: BLE001 - the others must be stopped all the same
                self.log.error("actor failed to stop", actor=instance, cause=repr(cause), trace=_trace(cause))
            await runner.actor.site.cancel_tasks()
            runner.close()
        trace.write(self.spec.name)

    def close(self) -> None:
        """Close the sockets and remove what the actors left."""
        self._watch(0.0)
        self.post.close()
        self.context.destroy(linger=200)
        remove(self.files)

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
                    news = PeerNews(instance, self.spec.plan.actors[instance].kind, up)
                    runner.put(Envelope(instance, news, None), CONTROL)
                runner.drain()

    def _host(self, instance: str, make: Callable[[ActorSite], Actor[Any]]) -> None:
        actor_plan = self.spec.plan.actors.get(instance)
        site = ActorSite(instance, self.post, self.log.bind(actor=instance),
                         dict(actor_plan.edges) if actor_plan else {}, self._failed)
        site.services = self._services
        site.keeper = self._keep
        actor = make(site)
        runner = self.runners[instance] = Runner(actor, self._failed)
        self.post.host(instance, runner)

    def _failed(self, instance: str, cause: BaseException) -> None:
        runner = self.runners.get(instance)
        # What keeps an actor from starting is told in the cause; where in the code it was found helps nobody.
        told = runner is not None and not runner.opened and self.spec.plan.log.level != "debug"
        trace = {} if told else {"trace": _trace(cause)}
        if runner is not None:
            runner.close()
        self.log.error("actor failed", actor=instance, cause=repr(cause), **trace)
        self._report(instance, cause)

    def _keep(self, path: str) -> None:
        self.files.add(path)
        if "root" in self.post.peers:
            self.post.tell(f"@{self.spec.name}", ROOT, Left(path), CONTROL)

    def _watch(self, limit: float) -> None:
        """Let a stuck loop end the process after ``limit`` seconds; never inside somebody's program."""
        if self._watchdog is not None:
            self._watchdog.close()
        self._watchdog = Watchdog(limit, self._stuck) if limit and "root" in self.post.peers else None

    def _stuck(self, instance: str, cause: str, stack: str) -> None:
        """On the watchdog's thread: the loop and its sockets cannot be used, so the root is told over a new one."""
        self.log.error("cell is stuck", culprit=instance, cause=cause, trace=stack)
        header = Header(TELL, ROOT, f"@{self.spec.name}", self.spec.name, self.spec.epoch, CONTROL,
                        target_epoch=self.spec.root_epoch)
        body = Codec(()).encode(ActorFailed(self.spec.name, self.spec.epoch, instance, cause))
        context = zmq.Context()
        with context.socket(zmq.DEALER) as socket:
            socket.connect(address(self.spec.directory, "root", self.spec.root_epoch))
            socket.send_multipart([msgspec.msgpack.encode(header), *body])
            socket.set(zmq.LINGER, 1000)
        context.term()
        remove(self.files)
        os._exit(FAILED)


def _trace(cause: BaseException) -> str:
    return "".join(traceback.format_exception(cause))


async def run(spec: CellSpec, files: set[str] | None = None) -> int:
    """A cell's process: join the root, do what it says, end when it says or when an actor fails.

    ``files``: filled with what must be removed should the process end by another way.
    """
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    me = f"@{spec.name}"

    def end(code: int) -> None:
        if not ended.done():
            ended.set_result(code)

    def failed(instance: str, cause: BaseException) -> None:
        if not ended.done():
            cell.post.tell(me, ROOT, ActorFailed(spec.name, spec.epoch, instance, repr(cause)), CONTROL)
            end(FAILED)

    cell = Cell(spec, failed, halted=lambda: end(0))
    if files is not None:
        cell.files = files
    try:
        cell.post.where[ROOT] = "root"
        cell.post.connect("root", Peer(address(spec.directory, "root", spec.root_epoch), spec.root_epoch))
        if cell.build():
            cell.post.tell(me, ROOT, Joined(spec.name, spec.epoch, schema(spec.plan)), CONTROL)
        gc.freeze()  # what was imported stays: a full collection that looks at all of it takes a tenth of a second
        code = await ended
        if code:
            trace.write(spec.name)
    finally:
        cell.close()  # what was told to the root has 200 ms to leave
    return code


def main() -> int:
    """Entry of a cell's process: name and directory are arguments, the specification is a line on standard input.

    Standard input stays open as long as the root lives. When it ends, the root is dead and so are we.
    """
    import resource
    import signal

    import uvloop

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the root decides when to stop
    line = sys.stdin.buffer.readline()
    files: set[str] = set()
    if not line.endswith(b"\n"):
        _watch_root(sys.argv[2], files)  # it died before it had told us anything
    spec = msgspec.json.decode(line, type=CellSpec)
    threading.Thread(target=_watch_root, args=(spec.directory, files), name="root", daemon=True).start()
    options = spec.plan.log
    log.configure(options.level, options.format, options.prompts, everywhere=True)
    sys.setswitchinterval(SWITCH_INTERVAL)
    # ZeroMQ aborts the process when descriptors run out; the soft limit is often a thousand, the hard one far higher.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    gc.set_threshold(50_000, 20, 20)  # messages are gc-free structs; frequent young collections only add jitter
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(spec, files))


def _watch_root(directory: str, files: set[str]) -> None:
    # A thread, so that a loop that is busy or stuck does not outlive the root. No farewell to clients: they resume
    # at the next deployment, whereas a refusal would be final.
    try:
        while os.read(0, 4096):
            pass
    finally:
        remove(files)
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(ORPHANED)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # native libraries' threads may still compute: taking the interpreter down under them aborts
