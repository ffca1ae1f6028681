"""The scheduler composes each step and takes its outcome; its roster (roster.py) knows the sequences.

It does not know text, tensors, or how drafts are made and judged.
"""

import asyncio
import time
from collections import deque
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from antiphon.actors.columns import unpack
from antiphon.actors.policy import Length, Policy
from antiphon.actors.protocol import (
    Admit,
    Cancel,
    Configure,
    Configured,
    Describe,
    Described,
    Drafted,
    Executed,
    Inspect,
    Load,
    Loaded,
    Observed,
    Page,
    Paged,
    Prepare,
    Prepared,
    Report,
    Reserved,
    Verified,
)
from antiphon.actors.roster import Roster
from antiphon.actors.sequences import Sequence
from antiphon.actors.step import Part, Step
from antiphon.runtime import trace
from antiphon.runtime.actor import Actor, ActorSite
from antiphon.runtime.errors import AskFailed, PeerRestarted
from antiphon.runtime.plugin import Options

Positive = Annotated[int, msgspec.Meta(ge=1)]
REVIVED = ("drafter", "verifier", "pager")  # may live in cells of their own, which restart alone
MOST_DRAFTS = 63  # with the row they hang on they fill the 64 bits of a tree's mask
FAILURES = 3  # failed Drafts in a row after which no more drafts are wanted of this incarnation


class SchedulerOptions(Options, frozen=True):
    """Limits of a step and of the queues."""

    max_step_tokens: Positive = 2048  # rows of one step
    max_chunk: Annotated[int, msgspec.Meta(ge=0)] = 512  # rows of one sequence's prefill in one step; 0: no limit
    max_running: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 256  # sequences in a step
    max_waiting: Positive = 4096  # admitted and not yet running
    ahead: Literal[0, 1] = 1  # steps planned before the one in flight is verified; Execute names one pending step
    reserve_ahead: Annotated[int, msgspec.Meta(ge=0)] = 32  # KV slots asked for beyond the need
    orphan_grace: float = 30.0  # seconds a request outlives the loss of its tokenizer
    ask_timeout: float = 120.0  # seconds for each ask of a step


class Scheduler(Actor[SchedulerOptions]):
    """Runs the step loop: plan, draft, reserve, execute, verify, apply, commit."""

    kind = "scheduler"
    plugs = ("policy", "length")
    defaults: ClassVar[dict[str, str]] = {"length": "fixed"}
    uses = ("allocator", "pager", "drafter", "executor", "verifier")

    def __init__(self, options: SchedulerOptions, site: ActorSite):
        super().__init__(options, site)
        self.policy: Policy[Any] = site.plugin("policy")
        self.length: Length[Any] = site.plugin("length")
        self.roster = Roster(self, options.max_waiting, options.orphan_grace)
        self.flight: deque[Step] = deque()
        self.down: set[str] = set()  # kinds of actor whose cell died and is not back
        self.reopen: set[str] = set()  # kinds of actor that lost their state
        self.failures = 0  # Drafts in a row that failed
        self._ticket = 0  # of the blocks that move for the step being launched
        self.wake = asyncio.Event()
        self.number = 0
        self.clock = {"steps": 0, "rows": 0, "plan_s": 0.0, "ask_s": 0.0, "wait_s": 0.0, "apply_s": 0.0,
                      "preempted": 0, "drafted": 0, "accepted": 0, "wall_s": 0.0, "peak_flight": 0, "degraded": 0}

    # ---- start and stop

    async def start(self) -> None:
        """Introduce the step's actors to the model, then begin to step."""
        patience = 600.0
        self.model = (await self.ask(self.peer("executor"), Describe(), Described, patience)).facts
        self.pools = await self.ask(self.peer("allocator"), Configure(self.model), Configured)
        self.roster.know(self.model, self.pools)
        self.drafter, self.verifier, _ = [await self._first(kind, patience) for kind in REVIVED]
        loaded = await self.ask(self.peer("executor"), Load(self.pools), Loaded, patience)
        self.log.info("model loaded", model=self.model.name, dtype=self.model.dtype, seconds=round(loaded.seconds, 2),
                      kv_slots=self.pools.blocks[0] * self.pools.block_size)
        self.spawn(self._steps(), "steps")

    def on_peer(self, instance: str, kind: str, up: bool) -> None:
        """Note who has to be opened anew; without memory or device there is no going on."""
        if kind == "tokenizer":
            if up:
                self.roster.found(instance)
            else:
                self.roster.lost(instance)
                asyncio.get_running_loop().call_later(self.options.orphan_grace + 0.1, self.wake.set)
        elif instance in self.site.edges.values() and kind in REVIVED:
            (self.down.discard if up else self.down.add)(kind)
            if up:
                self.reopen.add(kind)
                self.failures *= kind != "drafter"
            self.wake.set()
        elif instance in self.site.edges.values() and not up:
            self.spawn(self._bereaved(instance), "bereaved")

    async def _bereaved(self, instance: str) -> None:
        raise PeerRestarted(f"{instance} died, and with it the KV of every sequence")

    # ---- inboxes

    def on_admit(self, message: Admit) -> None:
        """Append; the next plan reads it."""
        self.roster.admitted.append((message, self.sender))
        self.wake.set()

    def on_cancel(self, message: Cancel) -> None:
        """Append; the next plan reads it. Unknown ids are remembered, for the cancel may overtake the admission."""
        self.roster.cancelled[message.request] = message.reason
        self.wake.set()

    def on_inspect(self, message: Inspect) -> Report:
        """Facts for an operator."""
        return Report(self.facts())

    def facts(self) -> dict[str, Any]:
        """Queues, steps and where their time went."""
        return {"waiting": len(self.roster.waiting), "running": len(self.roster.running), "flight": len(self.flight),
                **self.clock}

    # ---- the step loop

    async def _steps(self) -> None:
        """The one activity: launch while a step can be planned, else finish the oldest in flight, else wait."""
        while True:
            self.roster.intake()
            await self._revive()
            began = time.perf_counter()
            step = self._plan() if len(self.flight) <= self._ahead() else None
            self.clock["plan_s"] += time.perf_counter() - began
            if step is not None and await self._launch(step):
                self.flight.append(step)
                self.clock["peak_flight"] = max(self.clock["peak_flight"], len(self.flight))
            elif self.flight:
                await self._finish(self.flight.popleft())
            elif step is None and not self.roster.called and not self.reopen - self.down:
                self.wake.clear()
                await self.wake.wait()

    def _ahead(self) -> int:
        """Steps that may be in flight while another is planned: none if tokens must be known on the host first."""
        if not self.verifier.device or (self.drafter.most and self.drafter.lag == 0):
            return 0
        return self.options.ahead

    async def _revive(self) -> None:
        """Introduce actors that came back to the model and to what runs."""
        for kind in sorted(self.reopen - self.down):
            self.reopen.discard(kind)
            try:
                prepared = await self._prepare(kind, self.options.ask_timeout)
            except PeerRestarted:
                continue  # it died again; its next incarnation is told
            if kind == "drafter":
                self.drafter = prepared
            elif kind == "verifier":
                self.verifier = prepared
            if kind != "pager":
                self.roster.open_at(kind, self.roster.running)

    async def _prepare(self, kind: str, patience: float) -> Prepared:
        return await self.ask(self.peer(kind), Prepare(self.model), Prepared, patience)

    async def _first(self, kind: str, patience: float) -> Prepared:
        """Prepare at the start, when an actor in a cell of its own may be down."""
        ends = time.monotonic() + patience
        while True:
            try:
                return await self._prepare(kind, patience)
            except PeerRestarted:
                await self._woken(ends)

    async def _woken(self, ends: float) -> None:
        """Wait for news of another cell. Raises TimeoutError at ``ends``, a monotonic second."""
        self.wake.clear()
        async with asyncio.timeout(max(0.1, ends - time.monotonic())):
            await self.wake.wait()

    # ---- planning

    def _plan(self) -> Step | None:
        """Rows for everyone who runs, then for those who can begin; None if nobody has a row to compute."""
        parts: list[Part] = []
        roster = self.roster
        room = self.options.max_step_tokens
        chunk = self.options.max_chunk or room
        decoding: list[Sequence] = []
        filling: list[Sequence] = []
        for sequence in roster.running:
            uncomputed = sequence.total - sequence.planned
            if uncomputed > 0 and sequence.total < sequence.end and not sequence.cancelled:
                (decoding if uncomputed == 1 else filling).append(sequence)
        # Decoding first (one row each), so that a long prefill never holds the others up.
        for sequence in decoding + filling:
            if room < 1:
                break
            parts.append(Part(sequence, min(sequence.total - sequence.planned, chunk, room)))
            room -= parts[-1].count
        begin = len(roster.running) < self.options.max_running and room > 0 and roster.waiting
        for sequence in self.policy.order(roster.waiting) if begin else ():
            if room < 1 or len(roster.running) >= self.options.max_running or not roster.fits(sequence):
                break
            roster.begin(sequence)
            parts.append(Part(sequence, min(sequence.uncomputed, chunk, room)))
            room -= parts[-1].count
        if not parts:
            return None
        self.number += 1
        return Step(self.number, parts)

    # ---- launching

    async def _launch(self, step: Step) -> bool:
        """Draft, reserve, page and execute; false if memory was short and the step was given up."""
        began = step.began = time.perf_counter()
        await self._draft(step)
        if not await self._reserve(step):
            return False
        capture = self.drafter.capture if self.drafter.observes else ()
        execute = step.execute(self.roster.changes, self._ticket, capture, reduce=not self.verifier.device)
        self.roster.changes = []
        # Nothing can be drafted after a token that is not known yet: with drafts, only other sequences go ahead.
        step.launched(promise=self._ahead() > 0 and not self.drafter.most)
        rows = step.rows()
        self.policy.served(rows)
        self.clock["rows"] += sum(rows.values())
        step.executed = await self.ask(self.peer("executor"), execute, Executed, self.options.ask_timeout)
        if step.predicting:
            step.verify = step.to_verify(step.executed)
            if "verifier" not in self.down and "verifier" not in self.reopen:
                self._ask_verdict(step)
        self.clock["ask_s"] += time.perf_counter() - began
        trace.point("scheduler", "launch", began)
        return True

    async def _draft(self, step: Step) -> None:
        parts = step.predicting
        if not parts or self.failures >= FAILURES or "drafter" in self.reopen | self.down:
            return
        try:
            message = step.draft(self._budgets(step))
            drafted = await self.ask(self.peer("drafter"), message, Drafted, self.options.ask_timeout)
        except PeerRestarted:
            return  # opened anew when it is back
        except AskFailed as cause:
            self._draft_failed(str(cause))
            return
        self.failures = 0
        for handle in step.take_drafts(drafted):
            self.roster.open_at("drafter", (p.sequence for p in parts if p.sequence.handle == handle))
        self.clock["drafted"] += sum(len(p.tokens) for p in parts)

    def _budgets(self, step: Step) -> list[int]:
        """Most drafts for each part that predicts; with them the step stays within its rows."""
        parts = step.predicting
        if not self.drafter.most:
            return [0] * len(parts)
        room = self.options.max_step_tokens - sum(p.count for p in step.parts)
        budgets = []
        wanted = self.length.budgets([p.sequence for p in parts], self.drafter.most)
        for want, part in zip(wanted, parts, strict=True):
            # A draft beyond the last token that may still be generated would be verified for nothing; one after a
            # token that is not known yet cannot be made.
            most = min(want, self.drafter.most, part.sequence.left - 1, MOST_DRAFTS, room)
            budgets.append(max(0, most) if part.count == 1 and not part.sequence.flight else 0)
            room -= budgets[-1]
        return budgets

    def _draft_failed(self, cause: str) -> None:
        """Decoding goes on without drafts; the drafter begins anew, and after some failures nothing is asked of it."""
        self.log.warning("no drafts", cause=cause)
        self.failures += 1
        if self.failures < FAILURES:
            self.reopen.add("drafter")
            return
        self.log.error("degraded: no more drafts are asked for", cause=cause)
        self.clock["degraded"] += 1
        self.drafter = Prepared()

    async def _reserve(self, step: Step) -> bool:
        """Get slots for the step. If memory is short: wait for what is in flight, drop drafts, preempt."""
        self._ticket = 0
        while (message := step.reserve(self.options.reserve_ahead)) is not None:
            reserved = await self.ask(self.peer("allocator"), message, Reserved, self.options.ask_timeout)
            self._take_grants(step, message.sequences, reserved)
            if reserved.moves:
                page = Page(step.number, reserved.moves, reserved.keys)
                self._ticket = (await self.ask(self.peer("pager"), page, Paged, self.options.ask_timeout)).ticket
            if not reserved.short:
                return True
            if self.flight:
                return False  # finish it first: it may end sequences, and no victim may be in flight
            if any(p.tokens for p in step.parts):
                for part in step.parts:
                    part.draft([], None)
                continue
            victim = self.policy.victim(self.roster.running)
            self.log.debug("preempted", request=victim.request.hex(), length=victim.total)
            self.clock["preempted"] += 1
            self.roster.preempt(victim)
            step.keep([p for p in step.parts if p.sequence is not victim])
            if not step.parts:
                return False
        return True

    def _take_grants(self, step: Step, handles: bytes, reserved: Reserved) -> None:
        parts = {p.sequence.handle: p for p in step.parts}
        columns = (unpack(handles).tolist(), unpack(reserved.hits).tolist(), unpack(reserved.granted).tolist())
        for handle, hit, granted in zip(*columns, strict=True):
            sequence = parts[handle].sequence
            sequence.granted = granted
            if hit:  # at most total - 1: the last token is always computed
                sequence.computed = sequence.planned = hit
                parts[handle].restart(hit)
                step.keep(step.parts)
        self.roster.changes += unpack(reserved.changes).tolist()

    # ---- finishing

    async def _finish(self, step: Step) -> None:
        """Await the verdict, apply it in one go, observe, commit, emit."""
        began = time.perf_counter()
        verified = await self._verdict(step) if step.verify is not None else None
        self.clock["wait_s"] += time.perf_counter() - began
        began = time.perf_counter()
        kept, ids, emitted, finished = step.apply(verified)
        self.clock["accepted"] += sum(map(len, kept))
        if self.drafter.observes and "drafter" not in self.reopen | self.down:
            try:
                await self.ask(self.peer("drafter"), step.observe(kept, ids), Observed, self.options.ask_timeout)
            except AskFailed:
                self.reopen.add("drafter")
        commit = step.commit(kept, ids)
        for kind in ("allocator", "executor", "drafter"):
            self.tell(self.peer(kind), commit)
        if emitted:
            self.roster.emit(emitted)
        for sequence, finish in finished:
            self.roster.end(sequence, finish, told=True)
        for sequence in [p.sequence for p in step.parts if p.sequence.cancelled]:
            if not sequence.flight and sequence.handle >= 0:
                self.roster.end(sequence, sequence.cancelled)
        now = time.perf_counter()
        self.clock["apply_s"] += now - began
        self.clock["wall_s"] += now - step.began
        self.clock["steps"] += 1
        trace.point("scheduler", "finish", began)

    async def _verdict(self, step: Step) -> Verified:
        """The verifier's answer; a verifier in a cell of its own may die and is asked again by its successor."""
        ends = time.monotonic() + self.options.ask_timeout
        while True:
            while "verifier" in self.down:
                await self._woken(ends)
            await self._revive()
            if step.verified is None:
                self._ask_verdict(step)
                continue
            try:
                return await step.verified
            except PeerRestarted:
                if self.verifier.device or time.monotonic() > ends:
                    raise
                step.verified = None

    def _ask_verdict(self, step: Step) -> None:
        assert step.verify is not None
        step.verified = self.site.post.request(
            self.site.instance, self.peer("verifier"), step.verify, self.options.ask_timeout)


__all__ = ["Length", "Policy", "Scheduler", "SchedulerOptions"]
