"""The thread of one tier: runs blocking calls one at a time, look-ups before reads before writes.

It does not know what the calls do, nor what their failure means.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
LOOK, READ, WRITE = range(3)  # urgency


class _Job(NamedTuple):
    call: Callable[[], Any]
    future: "asyncio.Future[Any]"


class Worker:
    """Belongs to the loop that made it."""

    def __init__(self, name: str) -> None:
        self.busy_since = 0.0  # monotonic second at which the running call began; 0: none runs
        self._loop = asyncio.get_running_loop()
        self._queues: tuple[deque[_Job], ...] = (deque(), deque(), deque())
        self._running: _Job | None = None
        self._wake = threading.Condition()
        self._closed = False
        # A daemon: a call that never ends must not keep the process.
        self._thread = threading.Thread(target=self._work, name=f"tier:{name}", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T], urgency: int) -> "asyncio.Future[T]":
        """Queue a call."""
        future: asyncio.Future[T] = self._loop.create_future()
        with self._wake:
            self._queues[urgency].append(_Job(call, future))
            self._wake.notify()
        return future

    def fail(self, cause: BaseException) -> None:
        """Give up what waits and what runs; a running call's result will interest nobody."""
        with self._wake:
            running = self._running  # read once: the thread may end it at any moment
            jobs = [job for queue in self._queues for job in queue] + ([running] if running else [])
            for queue in self._queues:
                queue.clear()
        for job in jobs:
            _settle(job.future, None, cause)

    def close(self, timeout: float) -> None:
        """Run what is queued and end the thread, or leave it to itself after ``timeout`` seconds. Blocks."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(timeout)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            result, cause = None, None
            self.busy_since = time.monotonic()
            try:
                result = job.call()
            except Exception as failure:  # noqa: BLE001 - told to whoever waits
                cause = failure
            self.busy_since, self._running = 0.0, None
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(_settle, job.future, result, cause)
            del job, result, cause  # megabytes, perhaps, that would stay until the next call

    def _next(self) -> _Job | None:
        with self._wake:
            while True:
                for queue in self._queues:
                    while queue:
                        job = queue.popleft()
                        if not job.future.done():  # else nobody waits for it any more
                            self._running = job
                            return job
                if self._closed:
                    return None
                self._wake.wait()


def _settle(future: "asyncio.Future[Any]", result: Any, cause: BaseException | None) -> None:
    if future.done():
        return
    if cause is None:
        future.set_result(result)
    else:
        future.set_exception(cause)
        future.exception()  # seen: whoever waited may have given up
