"""Actors that do what a test says, in real cells of a deployment of their own.

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

from antiphon.runtime.actor import Actor, ActorSite
from antiphon.runtime.message import Message
from antiphon.runtime.plugin import Options, Plugin


class Boom(Exception):
    """What a probe raises when told to."""


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
                try:
                    await asyncio.sleep(1000)
                finally:
                    self.note("start given up")
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
        # structlog does without it where it is not installed; with it a fifth of every process's start goes there.
        (home / "rich.py").write_text("raise ImportError\n")
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

    def spawned(self) -> bool:
        """Whether the root has started its cells, however far they are."""
        return len(psutil.Process(self.process.pid).children()) == 2

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
