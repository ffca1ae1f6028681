"""A whole deployment inside a program: all actors in one cell, on a thread with a loop of its own.

It does not restart anything: whoever embeds it hears of a failure.
"""

import asyncio
import contextlib
import secrets
import sys
import threading
from collections.abc import Callable
from typing import Any

from antiphon.runtime import log
from antiphon.runtime.cell import SWITCH_INTERVAL, Cell
from antiphon.runtime.errors import CellFailed
from antiphon.runtime.orders import CellSpec
from antiphon.runtime.plan import MAIN, Plan, gather

PARTING = 1.0  # seconds that the other actors have to end after one has failed
SLACK = 10.0  # seconds beyond a deadline for the thread itself


class InProcess:
    """Runs ``plan`` gathered into one cell. ``start`` returns when every actor has started.

    ``failure`` is set when an actor fails later on; the other actors are stopped then and the thread ends.
    """

    def __init__(self, plan: Plan):
        self.plan = gather(plan)
        self.cell: Cell | None = None
        self.failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._main, name="antiphon", daemon=True)
        self._started = threading.Event()
        self._stop: asyncio.Event | None = None
        self._stopped = False
        self._deadline = 5.0

    def start(self) -> None:
        """Start the thread and wait for the actors. Raises CellFailed with the cause."""
        log.configure(self.plan.log.level, self.plan.log.format, self.plan.log.prompts)
        self._thread.start()
        late = not self._started.wait(self.plan.deadlines.start + SLACK)
        if late:
            self.failure = CellFailed(f"the actors did not start within {self.plan.deadlines.start:g} s")
        if self.failure is not None:
            self._end(PARTING)
            self.check()

    def check(self) -> None:
        """Raise CellFailed with the cause if an actor has failed."""
        if self.failure is not None:
            raise CellFailed(str(self.failure) or repr(self.failure)) from self.failure

    def stop(self, deadline: float = 5.0) -> None:
        """Stop the actors, draining until ``deadline`` seconds from now, and end the thread; idempotent.

        Raises CellFailed: the thread did not end, because an actor blocks its loop.
        """
        if self._thread.ident is not None and not self._stopped:
            self._stopped = True
            if not self._end(deadline):
                raise CellFailed(f"an actor has blocked its loop for {deadline + SLACK:g} s; its thread is left behind")

    def call(self, work: Callable[[Cell], Any]) -> Any:
        """Run ``work`` on the cell's loop and return what it returns. Raises CellFailed: an actor has failed."""
        self.check()
        assert self._loop is not None
        assert self.cell is not None
        done: Any = asyncio.run_coroutine_threadsafe(_call(work, self.cell), self._loop)
        return done.result(30)

    def _end(self, deadline: float) -> bool:
        """Tell the loop to stop and wait for its thread; false if it did not end."""
        self._deadline = deadline
        if self._loop is not None and self._stop is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # closed a moment ago
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(deadline + SLACK)
        return not self._thread.is_alive()

    def _main(self) -> None:
        import uvloop

        with _Switching():
            try:
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    runner.run(self._run())
            except BaseException as cause:  # noqa: BLE001 - told to whoever started the thread
                self.failure = self.failure or cause
            finally:
                self._started.set()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = stop = asyncio.Event()

        def failed(instance: str, cause: BaseException) -> None:
            if self.failure is None:
                self.failure = CellFailed(f"actor {instance!r}: {cause!r}")
                self.failure.__cause__ = cause
                self._deadline = PARTING
            stop.set()

        self.cell = cell = Cell(CellSpec(self.plan, MAIN, 1, "", 0), failed, inproc=f"cell-{secrets.token_hex(4)}")
        try:
            if cell.build():
                start = asyncio.ensure_future(cell.start())
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
            await cell.stop(self._deadline)
        finally:
            cell.close()


class _Switching:
    """The GIL's switch interval for as long as any deployment runs in this program; then what it was."""

    _lock = threading.Lock()
    _running = 0
    _before = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not _Switching._running:
                _Switching._before = sys.getswitchinterval()
                sys.setswitchinterval(SWITCH_INTERVAL)
            _Switching._running += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            _Switching._running -= 1
            if not _Switching._running:
                sys.setswitchinterval(_Switching._before)


async def _call(work: Callable[[Cell], Any], cell: Cell) -> Any:
    return work(cell)
