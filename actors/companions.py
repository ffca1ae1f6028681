"""The actors of a step that may live in cells of their own, restart alone and are then introduced anew.

It does not know sequences or steps.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from antiphon.actors.model import Facts
from antiphon.actors.protocol import Prepare, Prepared
from antiphon.runtime.actor import Actor
from antiphon.runtime.errors import PeerRestarted

KINDS = ("drafter", "verifier", "pager")
FAILURES = 3  # failed Drafts in a row after which no more drafts are wanted of this incarnation


class Companions:
    """Who is there, what the present incarnations said of themselves, and who has to be opened anew."""

    def __init__(self, actor: Actor[Any], timeout: float):
        self.drafter = Prepared()
        self.verifier = Prepared()
        self.down: set[str] = set()  # kinds of actor whose cell died and is not back
        self.reopen: set[str] = set()  # kinds of actor that lost their state
        self.degraded = 0  # times that a drafter was given up
        self.wake = asyncio.Event()  # of the scheduler's loop
        self._failures = 0  # Drafts in a row that failed
        self._actor = actor
        self._timeout = timeout

    @property
    def returned(self) -> set[str]:
        """Kinds that are back and wait to be introduced."""
        return self.reopen - self.down

    def present(self, kind: str) -> bool:
        """Whether an actor is there and knows what runs."""
        return kind not in self.down and kind not in self.reopen

    @property
    def drafts(self) -> bool:
        """Whether it makes sense to ask for drafts."""
        return self._failures < FAILURES and self.present("drafter")

    def heard(self, kind: str, up: bool) -> None:
        """Take note of a death or a return."""
        (self.down.discard if up else self.down.add)(kind)
        if up:
            self.reopen.add(kind)
            self._failures *= kind != "drafter"
        self.wake.set()

    async def meet(self, model: Facts, patience: float) -> None:
        """Introduce all of them at the start, when one in a cell of its own may be down. Raises TimeoutError."""
        self._model = model
        self.drafter, self.verifier, _ = [await self._first(kind, patience) for kind in KINDS]

    async def revive(self, tell: "Callable[[str], None]") -> None:
        """Introduce those that came back to the model, and by ``tell`` to what runs."""
        for kind in sorted(self.returned):
            self.reopen.discard(kind)
            try:
                prepared = await self._prepare(kind, self._timeout)
            except PeerRestarted:
                continue  # it died again; its next incarnation is told
            if kind == "drafter":
                self.drafter = prepared
            elif kind == "verifier":
                self.verifier = prepared
            if kind != "pager":
                tell(kind)

    def drafted(self) -> None:
        """The drafter did its work."""
        self._failures = 0

    def draft_failed(self, cause: str) -> None:
        """Decoding goes on without drafts; the drafter begins anew, and after some failures nothing is asked of it."""
        log = self._actor.log
        log.warning("no drafts", cause=cause)
        self._failures += 1
        if self._failures < FAILURES:
            self.reopen.add("drafter")
            return
        log.error("degraded: no more drafts are asked for", cause=cause)
        self.degraded += 1
        self.drafter = Prepared()

    async def woken(self, ends: float) -> None:
        """Wait for news of another cell. Raises TimeoutError at ``ends``, a monotonic second."""
        self.wake.clear()
        async with asyncio.timeout(max(0.1, ends - time.monotonic())):
            await self.wake.wait()

    async def _prepare(self, kind: str, patience: float) -> Prepared:
        actor = self._actor
        return await actor.ask(actor.peer(kind), Prepare(self._model), Prepared, patience)

    async def _first(self, kind: str, patience: float) -> Prepared:
        ends = time.monotonic() + patience
        while True:
            try:
                return await self._prepare(kind, patience)
            except PeerRestarted:
                await self.woken(ends)
