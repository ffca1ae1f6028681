"""Notices that a loop is stuck inside one callback, and says who is to blame and where it stands.

It does not know what is done about it.
"""

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType

from antiphon.runtime.actor import Runner

LOOKS = 4  # times the limit is divided by to get the interval between looks


class Watchdog:
    """Watches the loop of the thread that makes it, from a thread of its own.

    ``stuck(instance, cause, stack)`` is called once, on that thread, when the loop has not come round for ``limit``
    seconds. ``instance`` is empty where no actor's code is on the stack.
    """

    def __init__(self, limit: float, stuck: Callable[[str, str, str], None]):
        self.limit = limit
        self._stuck = stuck
        self._loop = asyncio.get_running_loop()
        self._watched = threading.get_ident()
        self._seen = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join(5)

    def _beat(self) -> None:
        self._seen = time.monotonic()

    def _watch(self) -> None:
        # An idle loop is woken once a look: with the default of 120 s, twice a minute.
        interval = self.limit / LOOKS
        while not self._over.is_set():
            try:
                self._loop.call_soon_threadsafe(self._beat)
            except RuntimeError:  # closed
                return
            slept = time.monotonic()
            if self._over.wait(interval):
                return
            if time.monotonic() - slept > 2 * interval + 0.5:
                self._seen = time.monotonic()  # the whole process was stopped: nobody is to blame for that
            if (silent := time.monotonic() - self._seen) > self.limit:
                frame = sys._current_frames().get(self._watched)
                instance, what = blame(frame, self._loop)
                stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
                self._stuck(instance, f"the loop is stuck in {what} for {silent:.1f} s", stack)
                return


def blame(frame: FrameType | None, loop: asyncio.AbstractEventLoop) -> tuple[str, str]:
    """Instance and a description of what runs: the innermost turn on the stack, else the running task."""
    while frame is not None:
        if frame.f_code is Runner._turn.__code__:
            actor = frame.f_locals["self"].actor
            message = type(frame.f_locals["envelope"].message).__name__
            return actor.site.instance, f"the turn of {message} at {actor.site.instance}"
        frame = frame.f_back
    task = asyncio.current_task(loop)
    if task is None:
        return "", "a callback"
    instance, _, activity = task.get_name().rpartition(":")
    return instance, f"the activity {activity!r} of {instance}" if instance else f"the task {activity!r}"
