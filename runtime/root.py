"""The root: starts the cells of a deployment as processes, watches them, restarts, degrades or gives up.

It does not know what cells do. It runs no actor but its own.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import zmq

from antiphon.runtime import log
from antiphon.runtime.actor import Actor, ActorSite, Runner
from antiphon.runtime.directory import Directory, remove
from antiphon.runtime.errors import AskFailed, AskTimeout, CellFailed, Escalated
from antiphon.runtime.graph import Plan, degrade
from antiphon.runtime.link import Inbox
from antiphon.runtime.message import CONTROL
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
    Probe,
    Probed,
    Started,
    address,
    schema,
)
from antiphon.runtime.plugin import Options
from antiphon.runtime.post import Peer, Post
from antiphon.runtime.process import FAILED, CellProcess

PROBE_EVERY = 5.0  # seconds between looks at the cells' health
BACKOFF_MOST = 5.0  # seconds
PARTING = 1.0  # seconds that the cells left over have to refuse what is open when the deployment gives up
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Supervisor(Actor[Options]):
    """The root's actor: hears cells join, become ready and fail."""

    kind = "supervisor"

    def __init__(self, site: ActorSite, root: "Root"):
        super().__init__(Options(), site)
        self.root = root

    def on_joined(self, message: Joined) -> None:
        """Note that a cell's sockets are bound."""
        if (cell := self._cell(message.cell, message.epoch)) is not None:
            cell.digest = message.digest
            cell.joined.set()

    def on_started(self, message: Started) -> None:
        """Note that a cell's actors have started."""
        if (cell := self._cell(message.cell, message.epoch)) is not None:
            cell.ready.set()

    def on_actor_failed(self, message: ActorFailed) -> None:
        """Note who is to blame for the death that follows."""
        if (cell := self._cell(message.cell, message.epoch)) is not None:
            cell.blame(message.instance, message.cause)

    def on_left(self, message: Left) -> None:
        """Note what must be removed at the end."""
        self.root.files.add(message.path)

    def _cell(self, name: str, epoch: int) -> CellProcess | None:
        cell = self.root.cells.get(name)
        return cell if cell is not None and cell.epoch == epoch else None


class Root:
    """Runs a deployment until told to stop. ``run`` returns the exit code."""

    post: Post
    directory: Directory

    def __init__(self, plan: Plan):
        self.plan = plan
        self.cells = {name: CellProcess(name) for name in plan.cells}
        self.log = log.logger(cell="root")
        self.up = asyncio.Event()
        self.degraded: list[str] = []
        self.files: set[str] = set()  # made by actors; the cell that made one may have died without removing it
        self._epoch = int(time.time() * 1000) & 0x7FFFFFFF
        self._digest = schema(plan)
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._failure: BaseException | None = None
        self._closing = contextlib.ExitStack()
        self._keepers: list[asyncio.Task[None]] = []

    def stop(self) -> None:
        """Begin an orderly stop; called again, end it at once."""
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()

    async def run(self) -> int:
        """Start every cell, supervise, and on ``stop`` drain and end them. 0, or 70 when supervision gave up.

        Raises CellFailed: there is no place for the sockets.
        """
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.stop)
        try:
            self._open()
            self._keepers = [loop.create_task(self._keep(c), name=f"keep {c.name}") for c in self.cells.values()]
            self._keepers.append(loop.create_task(self._probe_for_ever(), name="probe"))
            for keeper in self._keepers:
                keeper.add_done_callback(self._kept)
            await self._until(self._all_started(), self._stopping)
            if not self._stopping.is_set():
                self.up.set()
                self.log.info("ready", cells=list(self.cells))
            await self._stopping.wait()
            await self._until(self._halt_all(), self._hurry)
        finally:
            await self._end()
            for number in SIGNALS:
                loop.remove_signal_handler(number)
        if self._failure is not None:
            self.log.error("the deployment has failed", cause=str(self._failure))
            return FAILED
        return 0

    def _open(self) -> None:
        longest = max((len(name.encode()) for name in ("root", *self.cells)), default=0)
        self.directory = Directory(longest + len(".7fffffff"))
        self._closing.callback(self.directory.close)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._closing.callback(context.destroy, linger=0)
        inbox = Inbox(context, ["inproc://root", address(self.directory.path, "root", self._epoch)])
        self.post = Post("root", self._epoch, inbox, True, self.log)
        self._closing.callback(self.post.close)
        site = ActorSite(ROOT, self.post, self.log, {}, self._gave_up)
        runner = Runner(Supervisor(site, self), self._gave_up)
        self.post.host(ROOT, runner)
        for name in self.cells:
            self.post.where[f"@{name}"] = name
        runner.open()

    async def _until(self, work: Coroutine[Any, Any, None], event: asyncio.Event) -> None:
        """Work until it is done or the event comes."""
        working, stop = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait([working, stop], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                await working
        finally:
            working.cancel()
            stop.cancel()
            await asyncio.gather(working, stop, return_exceptions=True)

    # ---- starting

    async def _all_started(self) -> None:
        for cell in self.cells.values():
            await cell.first.wait()

    async def _start(self, cell: CellProcess) -> None:
        """Spawn a cell's process, introduce it to the others, start its actors and wait until they have.

        Raises CellFailed: it died or is late. Escalated: it is of another version.
        """
        epoch = cell.epoch + 1 if cell.epoch else self._epoch
        await cell.spawn(CellSpec(self.plan, cell.name, epoch, self.directory.path, self._epoch))
        limit = self.plan.deadlines.start + 5  # the cell itself says which actor is late
        await cell.expect(cell.joined, "did not bind its sockets", limit)
        if cell.digest != self._digest:
            raise Escalated(f"cell {cell.name!r} runs another version of Antiphon than its root: the schema of its "
                            f"messages is {cell.digest}, the root's {self._digest}. Install one version, start again")
        self.post.connect(cell.name, Peer(address(self.directory.path, cell.name, cell.epoch), cell.epoch))
        await asyncio.gather(*(c.joined.wait() for c in self.cells.values()))
        await asyncio.gather(*self._introduce(), return_exceptions=True)  # or a reply to it might find no way
        self.post.tell(ROOT, f"@{cell.name}", Begin(), CONTROL)
        await cell.expect(cell.ready, "did not get ready", limit)
        self._introduce()

    def _introduce(self) -> "list[asyncio.Future[object]]":
        """Tell every cell who is up; the futures are done when they know."""
        joined = {c.name: c for c in self.cells.values() if c.joined.is_set() and c.name in self.post.peers}
        peers = {n: Peer(address(self.directory.path, n, c.epoch), c.epoch) for n, c in joined.items()}
        peers["root"] = Peer(address(self.directory.path, "root", self._epoch), self._epoch)
        message = Meet(peers, tuple(n for n, c in joined.items() if c.ready.is_set()), tuple(self.degraded))
        known = [self.post.request(ROOT, f"@{name}", message, 10.0, CONTROL) for name in joined]
        for future in known:
            future.add_done_callback(lambda f: f.cancelled() or f.exception())  # a death meanwhile is judged elsewhere
        return known

    # ---- supervising

    async def _keep(self, cell: CellProcess) -> None:
        """Start a cell, and again whenever it dies, until supervision gives up. A first start must succeed."""
        while True:
            failure: CellFailed | None = None
            try:
                await self._start(cell)
                cell.first.set()
            except CellFailed as cause:
                failure = cause
                cell.kill()
            assert cell.process is not None
            code = await cell.process.wait()
            if not self._stopping.is_set():
                await cell.hear(code)
            self._bury(cell)
            if self._stopping.is_set():
                return
            if failure is not None and not cell.first.is_set():
                raise failure
            self.log.warning("cell died" if failure is None else "cell did not start", dead=cell.name, code=code,
                             culprit=cell.culprit, cause=cell.cause)
            self._judge(cell)
            await asyncio.sleep(min(self.plan.supervision.backoff * 2 ** max(0, len(cell.deaths) - 1), BACKOFF_MOST))
            if self._stopping.is_set():
                return

    def _kept(self, keeper: "asyncio.Task[None]") -> None:
        if not keeper.cancelled() and (cause := keeper.exception()) is not None:
            self._gave_up("", cause)

    def _bury(self, cell: CellProcess) -> None:
        """Forget a dead cell and let everybody know, unless it is our own doing."""
        cell.died()
        self.post.disconnect(cell.name)
        Path(address(self.directory.path, cell.name, cell.epoch).removeprefix("ipc://")).unlink(missing_ok=True)
        if not self._stopping.is_set():
            self._introduce()

    def _judge(self, cell: CellProcess) -> None:
        """Count a death. Past the limit an optional actor that causes it gets its stand-in; else raises Escalated."""
        rules, now = self.plan.supervision, time.monotonic()
        cell.deaths.append(now)
        while cell.deaths[0] < now - rules.within:
            cell.deaths.popleft()
        if len(cell.deaths) <= rules.restarts:
            return
        actors = self.plan.cells[cell.name].actors
        suspects = [cell.culprit] if cell.culprit in actors else list(actors)
        if not suspects or not all(self.plan.actors[i].on_failure == "degrade" for i in suspects):
            raise Escalated(f"cell {cell.name!r} died {len(cell.deaths)} times within {rules.within:g} s; last cause: "
                            f"{cell.why()}")
        for instance in suspects:
            self.plan = degrade(self.plan, instance)  # a stand-in's on_failure is "restart": it happens once
            self.degraded.append(instance)
            self.log.error("degraded: the plain stand-in takes over", actor=instance, cause=cell.cause)
        cell.deaths.clear()  # the stand-in has its own chances

    def _gave_up(self, _instance: str, cause: BaseException) -> None:
        if self._failure is None and not self._stopping.is_set():
            self._failure = cause
        self._stopping.set()

    async def _probe_for_ever(self) -> None:
        while True:
            await asyncio.sleep(min(PROBE_EVERY, self.plan.deadlines.stall / 2))
            await asyncio.gather(*(self._probe(c) for c in self.cells.values() if c.ready.is_set()))

    async def _probe(self, cell: CellProcess) -> None:
        """Kill a cell that makes no progress. Most say so themselves first (watchdog.py) and name the culprit."""
        stall, epoch = self.plan.deadlines.stall, cell.epoch
        try:
            try:
                health = await self._ask_health(cell, stall)
            except AskTimeout:  # it may be we who were stopped for so long
                health = await self._ask_health(cell, stall / 2 + 1)
            culprit, longest = max(health.stalled.items(), key=lambda item: item[1], default=("", 0.0))
            if longest < stall:
                return
            cause = f"no progress for {longest:.0f} s"
        except AskFailed as failure:
            culprit, cause = "", str(failure)
        if cell.ready.is_set() and cell.epoch == epoch and cell.alive():
            cell.blame(culprit, cause)
            self.log.error("cell makes no progress and is killed", dead=cell.name, culprit=culprit, cause=cause)
            cell.kill()

    async def _ask_health(self, cell: CellProcess, timeout: float) -> Probed:
        health: Probed = await self.post.ask(ROOT, f"@{cell.name}", Probe(), timeout, CONTROL)
        return health

    # ---- stopping

    async def _halt_all(self) -> None:
        """Stop users before the used, all within the stop deadline."""
        deadline = self.plan.deadlines.stop if self.up.is_set() and self._failure is None else PARTING
        ends = time.monotonic() + deadline
        self.log.info("stopping", deadline=deadline)
        for name in reversed(self.plan.cells):
            cell = self.cells[name]
            if not cell.alive() or not cell.joined.is_set() or name not in self.post.peers:
                continue
            left = max(0.2, ends - time.monotonic())
            try:
                answer = await self.post.ask(ROOT, f"@{name}", Halt(left), left + 1, CONTROL)
                assert isinstance(answer, Halted)
                assert cell.process is not None
                await asyncio.wait_for(cell.process.wait(), 3)
            except (AskFailed, TimeoutError) as cause:
                self.log.warning("cell did not stop in time", cell=name, cause=str(cause))

    async def _end(self) -> None:
        """Leave nothing behind."""
        self._stopping.set()
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for cell in self.cells.values():
            await cell.end()
        self._closing.close()
        remove(self.files)


def deploy(plan: Plan) -> int:
    """Run a deployment in this process until SIGTERM or SIGINT; the exit code."""
    import uvloop

    log.configure(plan.log.level, plan.log.format, plan.log.prompts, everywhere=True)

    async def main() -> int:
        return await Root(plan).run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())
