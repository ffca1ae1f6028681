"""A deployment in processes of its own, as ``antiphon serve`` runs it, that ends when this process does.

It does not know what is asked of it. Its messages go to standard error.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from antiphon.plugins.bench.figures import BenchError
from antiphon.plugins.doors.client import AsyncClient
from antiphon.plugins.doors.errors import Disconnected

T = TypeVar("T")
START = 900.0  # seconds; the first start may fetch a model
STOP = 20.0  # seconds before what does not stop is killed


class Deployment:
    """Use as ``with Deployment(...) as deployment``; ``settings`` are overrides as ``--set`` takes them."""

    def __init__(self, config: str, settings: Sequence[str]):
        self._home = Path(tempfile.mkdtemp(prefix="antiphon-bench-"))
        self._door = self._home / "door"
        self.address = f"ipc://{self._door}"
        command = [sys.executable, "-P", "-m", __spec__.name, str(self._home), config]
        for setting in ("log.level='warning'", *settings, f"actors.gateway.options.listen={self.address!r}"):
            command += ["--set", setting]
        # Standard input stays open as long as we live: its end tells the other side that we are gone.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2)

    async def connect(self, timeout: float) -> AsyncClient:
        """A connected client, once the deployment can serve. Raises BenchError: it did not start."""
        ends = time.monotonic() + START
        while time.monotonic() < ends:
            self._check()
            if not self._door.exists():  # the gateway starts last
                await asyncio.sleep(0.05)
                continue
            client = AsyncClient(self.address, timeout=timeout)
            try:
                await self.watched(self._ready(client))
                return client
            except Disconnected:
                continue
            except BaseException:
                await client.close()
                raise
        raise BenchError(f"the deployment was not ready within {START:g} s")

    @staticmethod
    async def _ready(client: AsyncClient) -> None:
        await client.connect()
        await client.wait_ready()

    async def watched(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` returns. Raises BenchError at once if the deployment ends before it."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=0.2)
                self._check()
            return await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _check(self) -> None:
        if (code := self._process.poll()) is not None:
            raise BenchError(f"the deployment ended with exit code {code}; its messages stand above",
                             2 if code == 2 else 1)

    def stop(self) -> None:
        """End it, and remove what it leaves; idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        shutil.rmtree(self._home, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def main(arguments: Sequence[str]) -> int:
    """``antiphon serve`` that stops at the end of its standard input and then removes its directory, given first."""
    from antiphon.__main__ import main as antiphon

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="watch", daemon=True).start()
    try:
        return antiphon(["serve", *arguments[1:]])
    finally:
        shutil.rmtree(arguments[0], ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
