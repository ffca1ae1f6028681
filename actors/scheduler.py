"""The scheduler composes each step and takes its outcome; its roster (roster.py) knows the sequences.

It does not know text, tensors, or how drafts are made and judged.
"""

import asyncio
import contextlib
import time
from collections import deque
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from antiphon.actors.columns import unpack
from antiphon.actors.companions import KINDS, Companions
from antiphon.actors.pace import Pace
from antiphon.actors.policy import Length, Policy
from antiphon.actors.protocol import (
    Admit,
    Cancel,
    Commit,
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
    Ready,
    Report,
    Reserved,
    Verified,
)
from antiphon.actors.roster import Roster
from antiphon.actors.sequences import Sequence
from antiphon.actors.step import Part, Step
from antiphon.actors.unison import Unison, UnisonStep
from antiphon.runtime import trace
from antiphon.runtime.actor import Actor, ActorSite
from antiphon.runtime.errors import AskFailed, PeerRestarted
from antiphon.runtime.plugin import Options

Positive = Annotated[int, msgspec.Meta(ge=1)]
SHORT_PAUSE = 0.05  # seconds before a lone sequence asks again for memory that pins or transfers hold


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
        self.others = Companions(self, options.ask_timeout)
        self.wake = self.others.wake
        self.pace = Pace()
        self.flight: deque[Step] = deque()
        self.unison: Unison | None = None  # what runs, while it runs in step
        self._ticket = 0  # of the blocks that move for the step being launched
        self.number = 0
        self.clock = {"steps": 0, "rows": 0, "plan_s": 0.0, "ask_s": 0.0, "wait_s": 0.0, "apply_s": 0.0,
                      "preempted": 0, "drafted": 0, "accepted": 0, "wall_s": 0.0, "peak_flight": 0}

    # ---- start and stop

    async def start(self) -> None:
        """Introduce the step's actors to the model, then begin to step."""
        patience = 600.0
        self.model = (await self.ask(self.peer("executor"), Describe(), Described, patience)).facts
        self.pools = await self.ask(self.peer("allocator"), Configure(self.model), Configured)
        self.roster.know(self.model, self.pools)
        await self.others.meet(self.model, patience)
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
        elif instance in self.site.edges.values() and kind in KINDS:
            self.others.heard(kind, up)
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

    def on_ready(self, message: Ready) -> None:
        """Append; the next plan reads it."""
        self.roster.readied += unpack(message.sequences).tolist()
        self.wake.set()

    def on_inspect(self, message: Inspect) -> Report:
        """Facts for an operator."""
        return Report(self.facts())

    def facts(self) -> dict[str, Any]:
        """Queues, steps and where their time went."""
        return {"waiting": len(self.roster.waiting), "running": len(self.roster.running), "flight": len(self.flight),
                **self.clock, "degraded": self.others.degraded}

    # ---- the step loop

    async def _steps(self) -> None:
        """The one activity: launch while a step can be planned, else finish the oldest in flight, else wait."""
        while True:
            if self.unison is not None and (self.roster.called or self.roster.orphaned or self.others.returned):
                self._part()
            self.roster.intake()
            await self._revive()
            began = time.perf_counter()
            step = self._plan() if len(self.flight) <= self._ahead() else None
            self.clock["plan_s"] += time.perf_counter() - began
            if step is not None and (launched := await self._launch(step)) is not None:
                self.flight.append(launched)
                self.clock["peak_flight"] = max(self.clock["peak_flight"], len(self.flight))
            elif self.flight:
                await self._finish(self.flight.popleft())
            elif step is None and not self.roster.called and not self.others.returned:
                self.wake.clear()
                await self.wake.wait()

    def _ahead(self) -> int:
        """Steps that may be in flight while another is planned: none if tokens must be known on the host first."""
        drafter = self.others.drafter
        if not self.others.verifier.device or (drafter.most and drafter.lag == 0):
            return 0
        return self.options.ahead

    async def _revive(self) -> None:
        """Introduce actors that came back to the model and to what runs."""
        if self.others.returned:
            await self.others.revive(lambda kind: self.roster.open_at(kind, self.roster.running))

    # ---- planning

    def _plan(self) -> Step | None:
        """Rows for everyone who runs, then for those who can begin; None if nobody has a row to compute."""
        parts: list[Part] = []
        roster = self.roster
        may_begin = bool(roster.waiting) and len(roster.running) < self.options.max_running
        if self.unison is not None:
            if not may_begin and self.unison.can_go_on():
                self.number += 1
                return UnisonStep(self.number, self.unison, self.unison.launched)
            self._part()
        room = self.options.max_step_tokens
        chunk = self.options.max_chunk or room
        decoding: list[Sequence] = []
        filling: list[Sequence] = []
        for sequence in roster.running:
            uncomputed = sequence.total - sequence.planned
            if uncomputed > 0 and sequence.total < sequence.end and not (sequence.cancelled or sequence.held):
                (decoding if uncomputed == 1 else filling).append(sequence)
        # Decoding first (one row each), so that a long prefill never holds the others up.
        for sequence in decoding + filling:
            if room < 1:
                break
            parts.append(Part(sequence, min(sequence.total - sequence.planned, chunk, room)))
            room -= parts[-1].count
        for sequence in self.policy.order(roster.waiting) if may_begin and room > 0 else ():
            if room < 1 or len(roster.running) >= self.options.max_running or not roster.fits(sequence):
                break
            if roster.waits_for_prompt(sequence):
                continue
            roster.begin(sequence)
            parts.append(Part(sequence, min(sequence.uncomputed, chunk, room)))
            room -= parts[-1].count
        if not parts:
            return None
        self.number += 1
        if self._together(parts):
            return UnisonStep(self.number, self._unite(parts), len(self.flight))
        return Step(self.number, parts)

    def _together(self, parts: list[Part]) -> bool:
        """Whether everyone who runs goes on by one row, as in the steps in flight."""
        drafter = self.others.drafter
        return (len(parts) == len(self.roster.running) and not drafter.most and not drafter.observes
                and Unison.possible(parts, self.flight))

    def _unite(self, parts: list[Part]) -> Unison:
        self.unison = unison = Unison(parts, self.flight, promise=self._ahead() > 0)
        self.flight = deque(UnisonStep.of(step, unison, turn) for turn, step in enumerate(self.flight))
        return unison

    def _part(self) -> None:
        """Go on sequence by sequence."""
        if self.unison is not None:
            self.unison.settle()
            self.unison = None
            self.flight = deque(s.apart() if isinstance(s, UnisonStep) else s for s in self.flight)

    # ---- launching

    async def _launch(self, planned: Step) -> Step | None:
        """Draft, reserve, page and execute; None if memory was short and the step was given up."""
        began = time.perf_counter()
        await self._draft(planned)
        step = await self._reserve(planned)
        if step is None:
            return None
        step.began = began
        drafter = self.others.drafter
        capture = drafter.capture if drafter.observes else ()
        execute = step.execute(self.roster.changes, self._ticket, capture, reduce=not self.others.verifier.device)
        self.roster.changes = []
        # Nothing can be drafted after a token that is not known yet: with drafts, only other sequences go ahead.
        step.launched(promise=self._ahead() > 0 and not drafter.most)
        rows = step.rows()
        self.policy.served(rows)
        self.clock["rows"] += sum(rows.values())
        step.executed = await self.ask(self.peer("executor"), execute, Executed, self.options.ask_timeout)
        if step.predicts:
            step.verify = step.to_verify(step.executed)
            if self.others.present("verifier"):
                self._ask_verdict(step)
        self.clock["ask_s"] += time.perf_counter() - began
        trace.point("scheduler", "launch", began)
        return step

    async def _draft(self, step: Step) -> None:
        most = self.others.drafter.most
        if not most or not step.predicting or not self.others.drafts:
            return
        try:
            message = step.draft(step.budgets(self.length, most, self.options.max_step_tokens))
            drafted = await self.ask(self.peer("drafter"), message, Drafted, self.options.ask_timeout)
        except PeerRestarted:
            return  # opened anew when it is back
        except AskFailed as cause:
            self.others.draft_failed(str(cause))
            return
        self.others.drafted()
        for handle in step.take_drafts(drafted):
            self.roster.open_at("drafter", (p.sequence for p in step.predicting if p.sequence.handle == handle))
        self.clock["drafted"] += sum(len(p.tokens) for p in step.predicting)

    async def _reserve(self, step: Step) -> Step | None:
        """Get slots for the step. If memory is short: wait for what is in flight, drop drafts, preempt."""
        self._ticket = 0
        while (message := step.reserve(self.options.reserve_ahead, self.pace)) is not None:
            reserved = await self.ask(self.peer("allocator"), message, Reserved, self.options.ask_timeout)
            self._take_grants(step, message.sequences, reserved)
            if reserved.moves:
                page = Page(step.number, reserved.moves, reserved.keys)
                self._ticket = (await self.ask(self.peer("pager"), page, Paged, self.options.ask_timeout)).ticket
            if not step.handles:
                return None  # all of them wait
            if not reserved.short:
                return step
            if self.flight:
                return None  # finish it first: it may end sequences, and no victim may be in flight
            if isinstance(step, UnisonStep):
                self._part()
                step = Step(step.number, [Part(s, 1) for s in step.unison.sequences])
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
                await self._pause()
                return None
        return step

    async def _pause(self) -> None:
        """Nobody could run, for pins or transfers hold the memory: not at once again."""
        if not self.roster.running:
            with contextlib.suppress(TimeoutError):
                await self.others.woken(time.monotonic() + SHORT_PAUSE)

    def _take_grants(self, step: Step, handles: bytes, reserved: Reserved) -> None:
        step.grant(unpack(handles).tolist(), unpack(reserved.hits).tolist(), unpack(reserved.granted).tolist())
        self.roster.changes += unpack(reserved.changes).tolist()
        self.roster.available = reserved.available
        step.hold(set(unpack(reserved.waits).tolist()))

    # ---- finishing

    async def _finish(self, step: Step) -> None:
        """Await the verdict, apply it in one go, observe, commit, emit."""
        began = time.perf_counter()
        if step.verified is None or step.verified.done():
            await asyncio.sleep(0)  # nothing of this step waits, but others must have their turns
        verified = await self._verdict(step) if step.verify is not None else None
        self.clock["wait_s"] += time.perf_counter() - began
        began = time.perf_counter()
        if isinstance(step, UnisonStep) and verified is not None:
            if not step.unison.ends(verified):
                commit, emit = step.unison.apply(step.number, verified)
                self._commit(commit)
                self.tell(step.unison.tokenizer, emit)
                self._finished(step, began)
                return
            self._part()
            step = step.apart()
        kept, ids, emitted, finished = step.apply(verified)
        self.clock["accepted"] += sum(map(len, kept))
        if self.others.drafter.observes and self.others.present("drafter"):
            try:
                await self.ask(self.peer("drafter"), step.observe(kept, ids), Observed, self.options.ask_timeout)
            except AskFailed:
                self.others.reopen.add("drafter")
        self._commit(step.commit(kept, ids))
        if emitted:
            self.roster.emit(emitted)
        for sequence, finish in finished:
            self.roster.end(sequence, finish, told=True)
        for sequence in [p.sequence for p in step.parts if p.sequence.cancelled]:
            if not sequence.flight and sequence.handle >= 0:
                self.roster.end(sequence, sequence.cancelled)
        self._finished(step, began)

    def _commit(self, commit: Commit) -> None:
        for kind in ("allocator", "executor", "drafter"):
            self.tell(self.peer(kind), commit)

    def _finished(self, step: Step, began: float) -> None:
        now = time.perf_counter()
        self.pace.take(step.work(), step.began, now)
        self.clock["apply_s"] += now - began
        self.clock["wall_s"] += now - step.began
        self.clock["steps"] += 1
        trace.point("scheduler", "finish", began)

    async def _verdict(self, step: Step) -> Verified:
        """The verifier's answer; a verifier in a cell of its own may die and is asked again by its successor."""
        ends = time.monotonic() + self.options.ask_timeout
        while True:
            while "verifier" in self.others.down:
                await self.others.woken(ends)
            await self._revive()
            if step.verified is None:
                self._ask_verdict(step)
                continue
            try:
                return await step.verified
            except PeerRestarted:
                if self.others.verifier.device or time.monotonic() > ends:
                    raise
                step.verified = None

    def _ask_verdict(self, step: Step) -> None:
        assert step.verify is not None
        step.verified = self.site.post.request(
            self.site.instance, self.peer("verifier"), step.verify, self.options.ask_timeout)


__all__ = ["Length", "Policy", "Scheduler", "SchedulerOptions"]
