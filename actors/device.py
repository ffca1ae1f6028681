"""The device table and the device thread of a cell: one owner for every device value, one order for all stages.

It does not know what values and stages are.
"""

import asyncio
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
    """Cell service "device": ``submit`` runs stages in order on one thread; only stages call ``value``."""

    def __init__(self, cell: str, epoch: int):
        self.cell = cell
        self.epoch = epoch
        self.busy = 0.0  # seconds spent in stages
        self.stages = 0
        self.chosen: dict[int, Any] = {}  # step -> tokens chosen by logit row, for pending ids
        self._values: dict[int, tuple[int, Any]] = {}  # slot -> generation, value
        self._steps: dict[int, list[int]] = {}  # step -> slots
        self._generation = 0
        self._free: list[int] = []
        self._next = 0
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"device:{cell}", daemon=True)
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
        """End the step: its handles become stale. Runs in stage order, so that queued stages still see them."""
        self._queue.put(lambda: self._release(step))

    def submit(self, stage: Callable[[], T], name: str) -> "asyncio.Future[T]":
        """Queue a stage; the future belongs to the calling loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        def run() -> None:
            began = time.perf_counter()
            try:
                result: T | None = stage()
                cause: BaseException | None = None
            except BaseException as error:  # noqa: BLE001 - told to whoever awaits the future
                result, cause = None, error
            ended = time.perf_counter()
            self.busy += ended - began
            self.stages += 1
            trace.point("device", name, began)
            loop.call_soon_threadsafe(_settle, future, result, cause)

        self._queue.put(run)
        return future

    def close(self) -> None:
        """End the thread once the queued stages have run."""
        self._queue.put(None)

    def _release(self, step: int) -> None:
        for slot in self._steps.pop(step, ()):
            self._values.pop(slot, None)
            self._free.append(slot)
        self.chosen.pop(step - 1, None)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job()


def _settle(future: "asyncio.Future[Any]", result: Any, cause: BaseException | None) -> None:
    if future.done():
        return
    if cause is None:
        future.set_result(result)
    else:
        future.set_exception(cause)
