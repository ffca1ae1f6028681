"""The root: starts the cells of a deployment as processes, watches them, restarts, degrades or gives up.

It does not know what cells do. It runs no actor but its own.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

import msgspec
import zmq

from antiphon.runtime import log
from antiphon.runtime.actor import Actor, ActorSite, Runner
from antiphon.runtime.cell import (
    ROOT,
    ActorFailed,
    Begin,
    CellSpec,
    Halt,
    Halted,
    Health,
    Joined,
    Peers,
    Probe,
    Ready,
    address,
)
from antiphon.runtime.errors import AskFailed, Escalated
from antiphon.runtime.graph import Plan, degrade
from antiphon.runtime.link import Inbox
from antiphon.runtime.plugin import Options
from antiphon.runtime.post import Peer, Post

PROBE_EVERY = 5.0  # seconds


class _Process:
    """One cell as the root sees it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.epoch = 0
        self.process: asyncio.subprocess.Process | None = None
        self.joined = asyncio.Event()
        self.ready = asyncio.Event()
        self.deaths: deque[float] = deque()
        self.culprit = ""
        self.cause = ""
        self.digest = ""


class Supervisor(Actor[Options]):
    """The root's actor: hears cells join, become ready and fail."""

    kind = "supervisor"

    def __init__(self, site: ActorSite, root: "Root"):
        super().__init__(Options(), site)
        self.root = root

    def on_joined(self, message: Joined) -> None:
        """Note that a cell's sockets are bound."""
        cell = self.root.cells[message.cell]
        if message.epoch == cell.epoch:
            cell.digest = message.digest
            cell.joined.set()

    def on_ready(self, message: Ready) -> None:
        """Note that a cell's actors have started."""
        cell = self.root.cells[message.cell]
        if message.epoch == cell.epoch:
            cell.ready.set()

    def on_actor_failed(self, message: ActorFailed) -> None:
        """Note who is to blame for the death that follows."""
        cell = self.root.cells[message.cell]
        if message.epoch == cell.epoch:
            cell.culprit, cell.cause = message.instance, message.cause


class Root:
    """Runs a deployment until told to stop. ``run`` returns the exit code."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.cells = {name: _Process(name) for name in plan.cells}
        self.directory = _directory()
        self.log = log.logger(cell="root")
        self.up = asyncio.Event()
        self.degraded: list[str] = []
        self._epoch = int(time.time() * 1000) & 0x7FFFFFFF
        self._stopping = asyncio.Event()
        self._failure: BaseException | None = None
        self._watchers: set[asyncio.Task[None]] = set()
        context = zmq.Context(io_threads=1)
        self._context = context
        inbox = Inbox(context, ["inproc://root", address(self.directory, "root", self._epoch)])
        self.post = Post("root", self._epoch, inbox, True, self.log)
        site = ActorSite(ROOT, self.post, self.log, {}, self._gave_up)
        runner = Runner(Supervisor(site, self), self._gave_up)
        self.post.host(ROOT, runner)
        for name in plan.cells:
            self.post.where[f"@{name}"] = name
        runner.open()

    def stop(self) -> None:
        """Begin an orderly stop."""
        self._stopping.set()

    async def run(self) -> int:
        """Start every cell, supervise, and on ``stop`` drain and end them. 0, or 70 when supervision gave up."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        try:
            await self._start_all()
            while not self._stopping.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), PROBE_EVERY)
                    break
                await self._probe_all()
            if self._failure is None:
                await self._halt_all()
        finally:
            await self._kill_all()
            self.post.close()
            self._context.destroy(linger=0)
            shutil.rmtree(self.directory, ignore_errors=True)
        if self._failure is not None:
            self.log.error("the deployment has failed", cause=str(self._failure))
            return 70
        return 0

    # ---- starting

    async def _start_all(self) -> None:
        starts = [asyncio.ensure_future(self._start(cell)) for cell in self.cells.values()]
        stop = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait([asyncio.gather(*starts), stop], return_when=asyncio.FIRST_COMPLETED)
            for start in starts:
                if start.done() and not start.cancelled() and (cause := start.exception()):
                    self._gave_up("", cause)
        finally:
            for task in [*starts, stop]:
                task.cancel()
            await asyncio.gather(*starts, stop, return_exceptions=True)
        if not self._stopping.is_set():
            self.up.set()
            self.log.info("ready", cells=list(self.cells))

    async def _start(self, cell: _Process) -> None:
        """Spawn a cell's process, introduce it to the others, start its actors and wait until they have."""
        cell.epoch = cell.epoch + 1 if cell.epoch else self._epoch
        cell.joined, cell.ready, cell.culprit, cell.cause = asyncio.Event(), asyncio.Event(), "", ""
        spec = CellSpec(self.plan, cell.name, cell.epoch, self.directory, self._epoch)
        environment = {**os.environ, "PYTHONSAFEPATH": "1"}
        # The cell's name among the arguments is for people who look at ps.
        cell.process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "antiphon.runtime.cell", cell.name, stdin=asyncio.subprocess.PIPE, env=environment,
            stdout=sys.stderr.fileno(),
        )
        pipe = cell.process.stdin
        assert pipe is not None
        pipe.write(msgspec.json.encode(spec) + b"\n")
        with contextlib.suppress(ConnectionError):
            await pipe.drain()
        watcher = asyncio.ensure_future(self._watch(cell, cell.process))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        await self._expect(cell, cell.joined, "did not bind its sockets")
        if len({c.digest for c in self.cells.values() if c.joined.is_set()}) > 1:
            raise Escalated("cells of this deployment run different versions of Antiphon")
        self.post.connect(cell.name, Peer(address(self.directory, cell.name, cell.epoch), cell.epoch))
        await asyncio.gather(*(c.joined.wait() for c in self.cells.values() if c.process is not None))
        await self._introduce()
        self.post.tell(ROOT, f"@{cell.name}", Begin())
        await self._expect(cell, cell.ready, "did not get ready")
        await self._introduce()

    async def _expect(self, cell: _Process, event: asyncio.Event, failure: str) -> None:
        """Await an event of a starting cell, its death or the deadline, whichever comes first."""
        assert cell.process is not None
        death = asyncio.ensure_future(cell.process.wait())
        wanted = asyncio.ensure_future(event.wait())
        try:
            done, _ = await asyncio.wait([death, wanted], timeout=self.plan.deadlines.start + 5,
                                         return_when=asyncio.FIRST_COMPLETED)
        finally:
            death.cancel()
            wanted.cancel()
        if wanted not in done:
            why = cell.cause or (f"exit code {cell.process.returncode}" if death in done else "deadline passed")
            raise Escalated(f"cell {cell.name!r} {failure}: {why}")

    async def _introduce(self) -> None:
        """Tell every cell who is up, and wait until they know."""
        joined = {c.name: c for c in self.cells.values() if c.joined.is_set() and c.name in self.post.peers}
        peers = {n: Peer(address(self.directory, n, c.epoch), c.epoch) for n, c in joined.items()}
        peers["root"] = Peer(address(self.directory, "root", self._epoch), self._epoch)
        message = Peers(peers, tuple(n for n, c in joined.items() if c.ready.is_set()))
        asks = (self.post.ask(ROOT, f"@{name}", message, 10.0) for name in joined)
        await asyncio.gather(*asks, return_exceptions=True)

    # ---- supervising

    async def _watch(self, cell: _Process, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        started = cell.ready.is_set()
        cell.joined.clear()
        cell.ready.clear()
        self.post.disconnect(cell.name)
        Path(address(self.directory, cell.name, cell.epoch).removeprefix("ipc://")).unlink(missing_ok=True)
        if self._stopping.is_set() or cell.process is not process:
            return
        if not started and not self.up.is_set():
            return  # the first start reports the failure itself
        self.log.warning("cell died", dead=cell.name, code=code, culprit=cell.culprit, cause=cell.cause)
        await self._introduce()
        try:
            await self._restart(cell)
        except Exception as cause:  # noqa: BLE001 - whatever keeps a cell down ends the deployment
            self._gave_up(cell.name, cause)

    async def _restart(self, cell: _Process) -> None:
        rules = self.plan.supervision
        now = time.monotonic()
        cell.deaths.append(now)
        while cell.deaths and cell.deaths[0] < now - rules.within:
            cell.deaths.popleft()
        if len(cell.deaths) > rules.restarts:
            self._degrade_or_escalate(cell)
        await asyncio.sleep(min(rules.backoff * 2 ** (len(cell.deaths) - 1), 5.0))
        if not self._stopping.is_set():
            try:
                await self._start(cell)
            except Escalated as cause:
                if cell.process is not None and cell.process.returncode is None:
                    raise
                self.log.warning("cell died while starting", dead=cell.name, cause=str(cause))

    def _degrade_or_escalate(self, cell: _Process) -> None:
        """Replace the optional actor that keeps killing its cell by its plain stand-in, or give up."""
        actors = self.plan.cells[cell.name].actors
        suspects = [cell.culprit] if cell.culprit in actors else list(actors)
        if all(self.plan.actors[i].on_failure == "degrade" and i not in self.degraded for i in suspects):
            for instance in suspects:
                self.plan = degrade(self.plan, instance)
                self.degraded.append(instance)
                self.log.error("degraded: the plain stand-in takes over", actor=instance, cause=cell.cause)
            cell.deaths.clear()
            return
        raise Escalated(f"cell {cell.name!r} died {len(cell.deaths)} times within "
                        f"{self.plan.supervision.within:g} s; last cause: {cell.cause or 'killed'}")

    def _gave_up(self, _instance: str, cause: BaseException) -> None:
        if self._failure is None:
            self._failure = cause
        self._stopping.set()

    async def _probe_all(self) -> None:
        for cell in self.cells.values():
            if not cell.ready.is_set() or cell.process is None:
                continue
            with contextlib.suppress(AskFailed):
                health: Health = await self.post.ask(ROOT, f"@{cell.name}", Probe(), self.plan.deadlines.stall)
                worst = max(health.stalled.items(), key=lambda item: item[1], default=("", 0.0))
                if worst[1] < self.plan.deadlines.stall:
                    continue
                cell.culprit, cell.cause = worst[0], f"no progress for {worst[1]:.0f} s"
            if cell.ready.is_set() and cell.process.returncode is None:
                self.log.error("cell makes no progress and is killed", dead=cell.name, culprit=cell.culprit)
                with contextlib.suppress(ProcessLookupError):
                    cell.process.kill()

    # ---- stopping

    async def _halt_all(self) -> None:
        """Stop users before the used, all within the stop deadline."""
        ends = time.monotonic() + self.plan.deadlines.stop
        self.log.info("stopping", deadline=self.plan.deadlines.stop)
        for name in reversed(self.plan.cells):
            cell = self.cells[name]
            if cell.process is None or not cell.joined.is_set():
                continue
            left = max(0.2, ends - time.monotonic())
            with contextlib.suppress(AskFailed, TimeoutError):
                answer = await self.post.ask(ROOT, f"@{name}", Halt(left), left + 2)
                assert isinstance(answer, Halted)
                await asyncio.wait_for(cell.process.wait(), 3)

    async def _kill_all(self) -> None:
        self._stopping.set()
        for cell in self.cells.values():
            process = cell.process
            if process is not None and process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        for task in list(self._watchers):
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)


def _directory() -> str:
    """A fresh directory of mode 0700 for the deployment's sockets; those of dead deployments are removed."""
    home = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    for old in home.glob(f"antiphon-{os.getuid()}-*"):
        pid = old.name.split("-")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(old, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"antiphon-{os.getuid()}-{os.getpid()}-", dir=home)


def deploy(plan: Plan) -> int:
    """Run a deployment in this process until SIGTERM or SIGINT; the exit code."""
    import uvloop

    log.configure(plan.log.level, plan.log.format, plan.log.prompts)

    async def main() -> int:
        return await Root(plan).run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())

