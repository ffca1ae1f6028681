"""The device table and the device thread of a cell: one owner for every device value, one order for all stages.

It does not know what values and stages are.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from antiphon.actors.protocol import Handle
from antiphon.runtime import trace

T = TypeVar("T")


class StaleHandle(Exception):
    """Seen by the stage that used it: the handle's step is committed, or its cell was another incarnation."""


class Device:
    """Cell service "device": ``submit`` runs stages in order on one thread; only stages call ``value``.

    ``thread`` false: stages run where they are submitted, at once. For devices whose stages take microseconds.
    """

    def __init__(self, cell: str, epoch: int, thread: bool = True):
        self.thread = thread
        self.cell = cell
        self.epoch = epoch
        self.busy = 0.0  # seconds spent in stages
        self.spent: dict[str, float] = {}  # the same by the stages' name
        self.stages = 0
        self.chosen: dict[int, Any] = {}  # step -> tokens chosen by logit row, for pending ids
        self._values: dict[int, tuple[int, Any]] = {}  # slot -> generation, value
        self._steps: dict[int, list[int]] = {}  # step -> slots
        self._generation = 0
        self._free: list[int] = []
        self._next = 0
        self._closed = False
        self._released: list[int] = []  # steps that end before the next stage
        self._held: list[Callable[[], None]] = []  # stages not yet handed to the thread
        self._queue: queue.SimpleQueue[list[Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"device:{cell}", daemon=True) if thread else None
        if self._thread is not None:
            self._thread.start()

    def promise(self, step: int) -> Handle:
        """A handle for a value that a stage of ``step`` will ``fulfil``."""
        slot = self._free.pop() if self._free else self._next
        self._next = max(self._next, slot + 1)
        self._generation += 1
        self._steps.setdefault(step, []).append(slot)
        self._values[slot] = (self._generation, None)
        return Handle(self.cell, self.epoch, slot, self._generation)

    def fulfil(self, handle: Handle, value: Any) -> None:
        """Store a promised value (on the device thread). A handle whose step is over is ignored."""
        if self._values.get(handle.slot, (0, None))[0] == handle.generation:
            self._values[handle.slot] = (handle.generation, value)

    def value(self, handle: Handle) -> Any:
        """Value of a live handle (on the device thread). Raises StaleHandle."""
        found = self._values.get(handle.slot)
        if (handle.cell, handle.epoch) != (self.cell, self.epoch) or found is None or found[0] != handle.generation:
            raise StaleHandle(f"handle {handle} is no longer valid in {self.cell}.{self.epoch}")
        if isinstance(found[1], BaseException):
            raise found[1]
        return found[1]

    def release(self, step: int) -> None:
        """End the step: its handles become stale before the next stage, after those already queued."""
        # Not a job of its own: waking the thread costs more than all of this (some 30 us each way here).
        self._released.append(step)

    def submit(self, stage: Callable[[], T], name: str) -> "asyncio.Future[T]":
        """Queue a stage; the future belongs to the calling loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, cause: BaseException | None) -> None:
            if self._thread is None:
                _settle(future, result, cause)
                return
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for the stage any more
                loop.call_soon_threadsafe(_settle, future, result, cause)

        self._put(stage, name, settle)
        self._hand_over()
        return future

    def enqueue(self, stage: Callable[[], object], name: str) -> None:
        """Queue a stage that nobody awaits; what goes wrong it must tell through the handles it was to fulfil."""
        # It waits for the stage that is submitted after it, if that happens in this turn of the loop: two wakes of the
        # thread cost twice one, and its first stage would fight with the loop's thread for the GIL.
        if not self._held and self._thread is not None:
            asyncio.get_running_loop().call_soon(self._hand_over)
        self._put(stage, name, None)

    def _hand_over(self) -> None:
        held, self._held = self._held, []
        if held:
            self._queue.put(held)

    def _put(self, stage: Callable[[], T], name: str, settle: "Callable[[T | None, BaseException | None], None] | None",
             ) -> None:
        released, self._released = self._released, []

        def run() -> None:
            for step in released:
                self._release(step)
            began = time.perf_counter()
            result, cause = None, None
            try:
                result = stage()
            except BaseException as error:  # noqa: BLE001 - told to whoever awaits the future
                cause = error
            spent = time.perf_counter() - began
            self.busy += spent
            self.spent[name] = self.spent.get(name, 0.0) + spent
            self.stages += 1
            trace.point("device", name, began)
            if settle is not None:
                settle(result, cause)

        if self._thread is None:
            run()
        else:
            self._held.append(run)

    def close(self, timeout: float = 5.0) -> None:
        """Drop the stages that have not begun and wait for the thread to end."""
        self._closed = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout)

    def _release(self, step: int) -> None:
        for slot in self._steps.pop(step, ()):
            self._values.pop(slot, None)
            self._free.append(slot)
        self.chosen.pop(step - 1, None)

    def _work(self) -> None:
        while (jobs := self._queue.get()) is not None:
            for job in jobs:
                if not self._closed:
                    job()


def _settle(future: "asyncio.Future[Any]", result: Any, cause: BaseException | None) -> None:
    if future.done():
        return
    if cause is None:
        future.set_result(result)
    else:
        future.set_exception(cause)
