"""Self time by kind of work on one event loop: spans nest, and each second belongs to the innermost one.

It does not know whose work it times. A span costs about half a microsecond.
"""

import time
import types
from collections import defaultdict
from collections.abc import Callable, Coroutine, Generator
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Meter:
    """``seconds`` by kind. Everything it wraps must run on one thread."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = 0.0  # seconds of the spans inside the one that runs

    def around(self, kind: str, work: Callable[P, T]) -> Callable[P, T]:
        """``work`` with its self time counted as ``kind``."""

        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            outer, self._inner = self._inner, 0.0
            began = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                spent = time.perf_counter() - began
                self.seconds[kind] += spent - self._inner
                self._inner = outer + spent

        return timed

    async def drive(self, kind: str, activity: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, the time between its waits counted as ``kind``."""
        result: T = await _resumed(self.around(kind, activity.send), self.around(kind, activity.throw))
        return result

    def replace(self, owner: object, name: str, kind: str) -> None:
        """Count a method of one object as ``kind`` from now on."""
        setattr(owner, name, self.around(kind, getattr(owner, name)))


@types.coroutine
def _resumed(send: Callable[[Any], Any], throw: Callable[[BaseException], Any]) -> Generator[Any, Any, Any]:
    resume: Callable[[Any], Any] = send
    value: Any = None
    while True:
        try:
            waits_for = resume(value)
        except StopIteration as end:
            return end.value
        try:
            resume, value = send, (yield waits_for)
        except BaseException as cause:  # noqa: BLE001 - handed to the activity, a cancel too
            resume, value = throw, cause
