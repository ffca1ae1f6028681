"""Real deployments for tests: servers as processes, and graphs inside the test's own process.

It does not know what is tested.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import numpy as np
import psutil

from antiphon.plugins.backends.null import NullOptions, expected
from antiphon.plugins.doors.llm import LLM
from antiphon.plugins.doors.sync import Client

NULL = ("actors.executor.plugin='null'", "actors.tokenizer.plugin='bytes'")
DELIVERIES = ("zmq", "direct")


def null_continuation(prompt: Sequence[int], count: int, options: NullOptions | None = None) -> list[int]:
    """Greedy ids after ``prompt`` that the null backend must produce, computed without pages."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(expected(np.array(ids), options or NullOptions()).argmax()))
    return ids[len(prompt):]


@contextmanager
def graph(*settings: str, null: bool = True) -> Iterator[LLM]:
    """The standard graph inside this process, on the null backend unless told otherwise."""
    with LLM(settings=[*(NULL if null else ()), *settings]) as llm:
        yield llm


class Server:
    """``antiphon serve`` as a process with its cells, listening on an ipc path below ``home``."""

    def __init__(self, home: Path, *settings: str, config: str = "standard", null: bool = True, wait: bool = True):
        self.home = home
        self.address = f"ipc://{home}/door"
        home.mkdir(parents=True, exist_ok=True)
        self.log = home / "server.log"
        self.sockets = Path(tempfile.mkdtemp(prefix="run-"))  # a socket's path may have 107 bytes
        overrides = [f"actors.gateway.options.listen='{self.address}'", *(NULL if null else ()), *settings]
        command = [sys.executable, "-P", "-m", "antiphon", "serve", config]
        for setting in overrides:
            command += ["--set", setting]
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(self.sockets), "PYTHONSAFEPATH": "1"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, stdin=subprocess.DEVNULL)
        if wait:
            with self.client() as client:
                client.wait_ready(120)

    def client(self, **options: float) -> Client:
        """A connected client."""
        return Client(self.address, **options)

    def cells(self) -> dict[str, psutil.Process]:
        """Living cell processes by name."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            try:
                line = child.cmdline()
            except psutil.Error:
                continue
            if "antiphon.runtime.cell" in line:
                found[line[line.index("antiphon.runtime.cell") + 1]] = child
        return found

    def kill(self, cell: str) -> None:
        """``kill -9`` a cell, or the root."""
        if cell == "root":
            self.process.kill()
        else:
            self.cells()[cell].kill()

    def stop(self, timeout: float = 30.0) -> int:
        """SIGTERM; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def text(self) -> str:
        """What the server has logged."""
        return self.log.read_text(errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        children = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        shutil.rmtree(self.sockets, ignore_errors=True)


def until(condition: object, timeout: float = 10.0, what: str = "the condition") -> None:
    """Poll ``condition`` (a callable) until it holds; fails the test at the deadline."""
    ends = time.monotonic() + timeout
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < ends, f"{what} did not come true within {timeout} s"
        time.sleep(0.01)
