"""Who waits for slots that are not there yet, whom to tell when they are, and the next deadline of anything.

It does not know what is waited for.
"""

import asyncio
import time
from collections.abc import Callable, Iterable

from antiphon.actors.contexts import Context

FOREVER = float("inf")


class Waits:
    """Sequences with an ``asker``, by sequence."""

    def __init__(self) -> None:
        self.waiting: dict[int, Context] = {}
        self._next = FOREVER  # monotonic second of the next deadline
        self._armed = asyncio.Event()

    def add(self, context: Context, asker: str) -> None:
        """The asker is told when the sequence can go on, at the latest ``until``."""
        context.asker = asker
        self.waiting[context.sequence] = context
        self.arm(context.until)

    def discard(self, sequence: int) -> None:
        """It waits no longer, and nobody is to be told."""
        if (context := self.waiting.pop(sequence, None)) is not None:
            context.asker = ""

    def take(self, sequences: Iterable[int]) -> dict[str, list[int]]:
        """Those of ``sequences`` that wait, by asker; they wait no longer."""
        askers: dict[str, list[int]] = {}
        for sequence in dict.fromkeys(sequences):
            if (context := self.waiting.get(sequence)) is not None:
                askers.setdefault(context.asker, []).append(sequence)
                self.discard(sequence)
        return askers

    def late(self, now: float) -> list[Context]:
        """Those that have waited as long as they may."""
        return [context for context in self.waiting.values() if context.until <= now]

    def arm(self, deadline: float) -> None:
        """Have ``expire`` called at that monotonic second."""
        if deadline < self._next:
            self._next = deadline
            self._armed.set()

    def rearm(self, deadlines: Iterable[float | None]) -> None:
        """After ``expire``: what is left, beside those who wait."""
        ends = [context.until for context in self.waiting.values()]
        self._next = min(ends + [d for d in deadlines if d is not None], default=FOREVER)

    async def watch(self, expire: Callable[[float], None]) -> None:
        """Call ``expire`` at each deadline; without one, sleep."""
        while True:
            left = self._next - time.monotonic()
            try:
                async with asyncio.timeout(left if left < FOREVER else None):
                    await self._armed.wait()
                self._armed.clear()
            except TimeoutError:
                expire(time.monotonic())
