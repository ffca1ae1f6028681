"""Small actors that do what a test says, alone between two posts or in real cells of a deployment of their own.

It does not know what is tested. Imported by cells too: it must stay light.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar, Self

import psutil
import zmq

from antiphon.runtime import log
from antiphon.runtime.actor import Actor, ActorSite, Runner
from antiphon.runtime.link import Inbox
from antiphon.runtime.message import Buffer, Message
from antiphon.runtime.plugin import Options, Plugin
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


# ---- in real cells


class ProbeOptions(Options, frozen=True):
    """``home``: where the probe writes what happens to it and looks for what to do."""

    home: str
    start: str = ""


class Trick(Plugin[Any]):
    """What a probe does beside remembering."""

    kind = "trick"

    def play(self) -> None:
        """In the turn of ``trick``."""


class PlainTrick(Trick, Plugin[Options]):
    """Does nothing."""


class WildTrick(Trick, Plugin[Options]):
    """Raises."""

    def play(self) -> None:
        raise Boom("wild")


class StuckTrick(Trick, Plugin[Options]):
    """Never returns."""

    def play(self) -> None:
        time.sleep(1000)


class Do(Message, frozen=True):
    """One of the probe's abilities."""

    what: str


class Done(Message, frozen=True):
    """Answers Try."""

    text: str


class Try(Message, frozen=True):
    """Like Do, asked."""

    what: str
    reply = Done


class Probe(Actor[ProbeOptions]):
    """Looks every 10 ms for a file ``NAME.do`` with something to do; writes to ``NAME.log``."""

    kind = "probe"
    plugs = ("trick",)
    stand_in = "plain"
    defaults: ClassVar[dict[str, str]] = {"trick": "plain"}

    def __init__(self, options: ProbeOptions, site: ActorSite):
        super().__init__(options, site)
        self.home = Path(options.home)
        self.trick: Trick = site.plugin("trick")
        self.note(f"made by {type(self.trick).__name__}")
        if options.start == "no constructor":
            raise Boom("no constructor")

    def note(self, text: str) -> None:
        for name, line in ((f"{self.site.instance}.log", text), ("all.log", f"{self.site.instance} {text}")):
            with (self.home / name).open("a") as journal:
                journal.write(f"{line}\n")

    async def start(self) -> None:
        self.note("starting")
        for word in self.options.start.split(","):
            await self.begin(word)
        if "idle" not in self.options.start:
            self.spawn(self.obey(), "obey")
        self.note("started")

    async def begin(self, word: str) -> None:
        if word.endswith(" while bad"):
            if not (self.home / "bad").exists():
                return
            word = word.removesuffix(" while bad")
        match word:
            case "raise":
                raise Boom("no start")
            case "exit":
                os._exit(3)
            case "hang":
                await asyncio.sleep(1000)
            case "block":
                time.sleep(1000)
            case "file":
                path = self.home / f"{self.site.instance}.sock"
                path.touch()
                self.site.leaves(str(path))

    async def stop(self, deadline: float) -> None:
        self.note("stopping")
        if "never stop" in self.options.start:
            await asyncio.sleep(1000)
        if "block stop" in self.options.start:
            time.sleep(1000)
        if "raise stop" in self.options.start:
            raise Boom("no stop")
        self.note("stopped")

    def on_peer(self, instance: str, kind: str, up: bool) -> None:
        self.note(f"{instance} {'up' if up else 'down'}")

    async def obey(self) -> None:
        order = self.home / f"{self.site.instance}.do"
        while True:
            await asyncio.sleep(0.01)
            if order.exists():
                what = order.read_text()
                order.unlink()
                self.do(what)

    def do(self, what: str) -> None:
        verb, _, rest = what.partition(" ")
        to, _, rest = rest.partition(" ")
        if verb == "tell":
            self.tell(to, Do(rest))
        elif verb == "ask":
            self.spawn(self.question(to, rest), "question")
        else:
            self.on_do(Do(what))

    async def question(self, to: str, what: str) -> None:
        try:
            answer = await self.ask(to, Try(what), Done, 5.0)
            self.note(f"answer {answer.text}")
        except Exception as cause:
            self.note(f"failed {type(cause).__name__}: {cause}")

    # ---- turns

    def on_do(self, message: Do) -> None:
        self.note(f"do {message.what}")
        match message.what:
            case "fail":
                raise Boom("told to")
            case "block":
                time.sleep(1000)
            case "exit":
                os._exit(3)
            case "trick":
                self.trick.play()

    def on_try(self, message: Try) -> Any:
        if message.what == "never":
            return asyncio.get_running_loop().create_future()
        self.on_do(Do(message.what))
        return Done(f"{message.what} at {self.site.post.epoch}, degraded: {','.join(self.site.post.degraded)}")


class Middleman(Probe):
    """A probe that uses another."""

    kind = "middleman"
    uses = ("probe",)


class Caller(Probe):
    """A probe that uses one that uses another."""

    kind = "caller"
    uses = ("middleman",)


def install(home: Path) -> None:
    """Make the probes known as pip would, to whoever has ``home`` on its path."""
    info = home / "probes-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: probes\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[antiphon.actor]\nprobe = tests.probes:Probe\ncaller = tests.probes:Caller\n"
        "middleman = tests.probes:Middleman\n"
        "[antiphon.trick]\nplain = tests.probes:PlainTrick\nwild = tests.probes:WildTrick\n"
        "stuck = tests.probes:StuckTrick\n")


class Deployment:
    """Probes in real cells: ``antiphon serve`` on a config of their own, in a directory with a short path."""

    def __init__(self, home: Path, actors: str, settings: str = "", wait: bool = True,
                 environment: dict[str, str] | None = None):
        self.home = home
        self.run = home / "run"
        self.run.mkdir(exist_ok=True)
        self.text = home / "server.log"
        install(home)
        config = home / "probes.toml"
        config.write_text(f"schema = 1\n{settings}\n{actors.replace('HOME', str(home))}")
        paths = [str(home), str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1",
                            "XDG_RUNTIME_DIR": str(self.run), **(environment or {})}
        command = [sys.executable, "-P", "-m", "antiphon", "serve", str(config)]
        with self.text.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=self.environment,
                                            stdin=subprocess.DEVNULL, start_new_session=True)
        if wait:
            self.until(lambda: self.ready() or self.process.poll() is not None, "the deployment is ready")
            assert self.ready(), self.output()

    def ready(self) -> bool:
        """Whether every cell has started."""
        return '"event": "ready"' in self.output()

    def output(self) -> str:
        """What the deployment has logged."""
        return self.text.read_text(errors="replace")

    def journal(self, instance: str) -> list[str]:
        """What has happened to a probe; ``all``: to all of them, in order."""
        path = self.home / f"{instance}.log"
        return path.read_text().splitlines() if path.exists() else []

    def do(self, instance: str, what: str) -> None:
        """Give a probe something to do."""
        draft = self.home / f"{instance}.draft"
        draft.write_text(what)
        draft.rename(self.home / f"{instance}.do")

    def cells(self) -> dict[str, psutil.Process]:
        """Living cell processes by name."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = path.read_bytes().decode(errors="replace").split("\0")
                if "antiphon.runtime.cell" in line and line[-2].startswith(f"{self.run}/"):
                    found[line[line.index("antiphon.runtime.cell") + 1]] = psutil.Process(int(path.parent.name))
            except (OSError, psutil.Error):
                continue  # it has just ended
        return found

    def until(self, condition: Any, what: str, timeout: float = 20.0) -> None:
        """Wait until ``condition()`` holds; the log explains why it did not."""
        ends = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < ends, f"not within {timeout} s: {what}\n{self.output()}"
            time.sleep(0.01)

    def hears(self, instance: str, line: str, times: int = 1) -> None:
        """Wait until a probe's journal has a line."""
        self.until(lambda: self.journal(instance).count(line) >= times, f"{instance} hears {line!r}")

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Signal the root."""
        self.process.send_signal(number)

    def ends(self, timeout: float = 20.0) -> int:
        """Exit code of the root; nothing may be left behind, neither process nor file."""
        code = self.process.wait(timeout)
        self.until(lambda: not self.cells(), "all cells have ended", 5.0)
        self.until(lambda: not list(self.run.iterdir()), f"no socket is left: {list(self.run.rglob('*'))}", 5.0)
        assert not list(self.home.glob("*.sock"))
        return code

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.signal()
        return self.ends()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        for process in self.cells().values():
            process.kill()
