"""One cell's process as the root sees it: spawned, awaited, blamed, killed.

It does not know when that should happen.
"""

import asyncio
import contextlib
import os
import sys
from collections import deque

import msgspec

from antiphon.runtime.errors import CellFailed
from antiphon.runtime.orders import CellSpec

FAILED = 70  # exit code of a cell whose actor has failed, after telling the root which, and of a root that gave up
LAST_WORD = 0.5  # seconds for what such a cell has told to arrive after its exit


class CellProcess:
    """The present incarnation of a cell and the memory of earlier ones."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.epoch = 0
        self.process: asyncio.subprocess.Process | None = None
        self.joined = asyncio.Event()
        self.ready = asyncio.Event()
        self.first = asyncio.Event()  # it has been ready once
        self.deaths: deque[float] = deque()
        self.culprit = ""
        self.cause = ""
        self.digest = ""
        self._blamed = asyncio.Event()

    async def spawn(self, spec: CellSpec) -> None:
        """Start the process. It lives no longer than its standard input, which nobody else holds, is open."""
        self.epoch, self.culprit, self.cause = spec.epoch, "", ""
        self._blamed.clear()
        environment = {**os.environ, "PYTHONSAFEPATH": "1"}
        # The cell's name among the arguments is for people who look at ps; the directory, so that a cell whose root
        # dies before it has said anything can remove it. A session of its own keeps a terminal's Ctrl-C for the root,
        # also before the cell can ignore it.
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "antiphon.runtime.cell", self.name, spec.directory,
            stdin=asyncio.subprocess.PIPE, env=environment, stdout=sys.stderr.fileno(), start_new_session=True,
        )
        pipe = self.process.stdin
        assert pipe is not None
        pipe.write(msgspec.json.encode(spec) + b"\n")
        with contextlib.suppress(ConnectionError):
            await pipe.drain()

    async def expect(self, event: asyncio.Event, failure: str, limit: float) -> None:
        """Await an event. Raises CellFailed: the process died first, or ``limit`` seconds passed."""
        assert self.process is not None
        death = asyncio.ensure_future(self.process.wait())
        wanted = asyncio.ensure_future(event.wait())
        try:
            done, _ = await asyncio.wait([death, wanted], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            death.cancel()
            wanted.cancel()
        if wanted not in done:
            if death in done:
                await self.hear(death.result())
            else:
                self.cause = f"nothing within {limit:g} s"
            raise CellFailed(f"cell {self.name!r} {failure}: {self.why()}")

    async def hear(self, code: int) -> None:
        """Wait for the last word of a process that said by its exit code that there is one."""
        if code == FAILED:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._blamed.wait(), LAST_WORD)
        self.cause = self.cause or (f"signal {-code}" if code < 0 else f"exit code {code}")

    def blame(self, culprit: str, cause: str) -> None:
        """Note what its death has come from, or is about to."""
        self.culprit, self.cause = culprit, cause
        self._blamed.set()

    def why(self) -> str:
        """What is known of the end."""
        named = self.culprit and not self.culprit.startswith("@")
        return f"actor {self.culprit!r}: {self.cause}" if named else self.cause or "unknown"

    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.returncode is None

    def kill(self) -> None:
        """End the process at once."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()

    def died(self) -> None:
        """Forget what the dead incarnation had reached."""
        self.joined.clear()
        self.ready.clear()
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()

    async def end(self) -> None:
        """Kill and reap."""
        if self.process is not None:
            self.kill()
            await self.process.wait()
            self.died()
