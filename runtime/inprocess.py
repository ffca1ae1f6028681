"""A whole deployment inside a program: all actors in one cell, on a thread with a loop of its own.

It does not restart anything: whoever embeds it hears of a failure.
"""

import asyncio
import secrets
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from antiphon.runtime import log
from antiphon.runtime.cell import SWITCH_INTERVAL, Cell, CellSpec
from antiphon.runtime.errors import CellFailed
from antiphon.runtime.plan import MAIN, Plan, gather


class InProcess:
    """Runs ``plan`` gathered into one cell. ``start`` returns when every actor has started."""

    def __init__(self, plan: Plan):
        self.plan = gather(plan)
        self.cell: Cell | None = None
        self.failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._main, name="antiphon", daemon=True)
        self._started = threading.Event()
        self._stop: asyncio.Event | None = None
        self._deadline = 5.0

    def start(self) -> None:
        """Start the thread and wait for the actors. Raises CellFailed with the cause."""
        log.configure(self.plan.log.level, self.plan.log.format, self.plan.log.prompts)
        self._thread.start()
        self._started.wait(self.plan.deadlines.start + 10)
        if self.failure is not None:
            self._thread.join(10)
            raise CellFailed(str(self.failure)) from self.failure
        if not self._started.is_set():
            raise CellFailed("the actors did not start in time")

    def stop(self, deadline: float = 5.0) -> None:
        """Stop the actors, draining until ``deadline`` seconds from now, and end the thread."""
        self._deadline = deadline
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(deadline + 10)

    def call(self, work: Callable[[Cell], Any]) -> Any:
        """Run ``work`` on the cell's loop and return what it returns."""
        assert self._loop is not None and self.cell is not None
        done: Any = asyncio.run_coroutine_threadsafe(_call(work, self.cell), self._loop)
        return done.result(30)

    def _main(self) -> None:
        import uvloop

        interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._run())
        except BaseException as cause:  # noqa: BLE001 - told to whoever started the thread
            self.failure = self.failure or cause
        finally:
            sys.setswitchinterval(interval)
            self._started.set()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = stop = asyncio.Event()

        def failed(_instance: str, cause: BaseException) -> None:
            self.failure = self.failure or cause
            stop.set()

        with tempfile.TemporaryDirectory(prefix="antiphon-") as directory:
            self.cell = Cell(CellSpec(self.plan, MAIN, 1, directory, 0), failed, inproc=f"cell-{secrets.token_hex(4)}")
            start = asyncio.ensure_future(self.cell.start())
            stopped = asyncio.ensure_future(stop.wait())
            try:
                await asyncio.wait([start, stopped], return_when=asyncio.FIRST_COMPLETED)
                if start.done():
                    await start
                    self._started.set()
                    await stopped
            finally:
                for task in (start, stopped):
                    task.cancel()
                await asyncio.gather(start, stopped, return_exceptions=True)
                await self.cell.stop(self._deadline)
                self.cell.close()


async def _call(work: Callable[[Cell], Any], cell: Cell) -> Any:
    return work(cell)
