"""The scheduler owns queues and sequences and composes each step.

It does not know text, tensors, or how drafts are made and judged.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, ClassVar

from antiphon.actors.columns import pack, unpack
from antiphon.actors.model import Facts
from antiphon.actors.protocol import (
    Admit,
    Cancel,
    Close,
    Configure,
    Configured,
    Describe,
    Described,
    Drafted,
    Emit,
    Executed,
    Inspect,
    Load,
    Loaded,
    Observed,
    Page,
    Paged,
    Prepare,
    Prepared,
    Refuse,
    Report,
    Reserved,
    Verified,
)
from antiphon.actors.sequences import Handles, Sequence
from antiphon.actors.step import Part, Step
from antiphon.runtime import trace
from antiphon.runtime.actor import Actor, ActorSite
from antiphon.runtime.errors import AskFailed, PeerRestarted
from antiphon.runtime.message import CONTROL, Message
from antiphon.runtime.plugin import O, Options, Plugin


class Policy(Plugin[O]):
    """Contract of a ``policy``: who is served next, and who gives way."""

    kind: ClassVar[str] = "policy"

    def order(self, waiting: list[Sequence]) -> list[Sequence]:
        """Waiting sequences in the order in which they should begin."""
        raise NotImplementedError

    def victim(self, running: list[Sequence]) -> Sequence:
        """The running sequence to preempt when memory is short."""
        raise NotImplementedError

    def served(self, sequence: Sequence, tokens: int) -> None:
        """A step computes ``tokens`` rows of the sequence."""


class Length(Plugin[O]):
    """Contract of a ``length``: how many drafts each sequence gets verified in a step."""

    kind: ClassVar[str] = "length"

    def budgets(self, sequences: list[Sequence], most: int) -> list[int]:
        """Most drafts per sequence, each at most ``most``; zero included."""
        raise NotImplementedError


class SchedulerOptions(Options, frozen=True):
    """Limits of a step and of the queues."""

    max_step_tokens: int = 2048  # rows of one step
    max_chunk: int = 512  # rows of one sequence's prefill in one step; 0: no limit
    max_running: int = 256  # sequences in a step
    max_waiting: int = 4096  # admitted and not yet running
    ahead: int = 1  # steps planned before the one in flight is verified
    reserve_ahead: int = 32  # KV slots asked for beyond the need
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
        self.handles = Handles()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.known: dict[bytes, Sequence] = {}
        self.flight: deque[Step] = deque()
        self.admitted: list[tuple[Admit, str]] = []  # inboxes, read by the next plan
        self.cancelled: dict[bytes, str] = {}
        self.early: dict[bytes, float] = {}  # cancels of unknown ids -> when to forget them
        self.orphans: list[Sequence] = []
        self.reopen: set[str] = set()  # kinds of actor that lost their state
        self._ticket = 0  # of the blocks that move for the step being launched
        self.changes: list[int] = []  # block-table changes not yet told to the executor
        self.wake = asyncio.Event()
        self.number = 0
        self.clock = {"steps": 0, "rows": 0, "plan_s": 0.0, "ask_s": 0.0, "wait_s": 0.0, "apply_s": 0.0,
                      "preempted": 0, "drafted": 0, "accepted": 0, "wall_s": 0.0}

    # ---- start and stop

    async def start(self) -> None:
        """Introduce the step's actors to the model, then begin to step."""
        patience = 600.0
        described = await self.ask(self.peer("executor"), Describe(), Described, patience)
        self.model: Facts = described.facts
        self.pools = await self.ask(self.peer("allocator"), Configure(self.model), Configured)
        prepare = Prepare(self.model)
        self.drafter = await self.ask(self.peer("drafter"), prepare, Prepared, patience)
        self.verifier = await self.ask(self.peer("verifier"), prepare, Prepared, patience)
        await self.ask(self.peer("pager"), prepare, Prepared, patience)
        loaded = await self.ask(self.peer("executor"), Load(self.pools), Loaded, patience)
        self.log.info("model loaded", model=self.model.name, dtype=self.model.dtype, seconds=round(loaded.seconds, 2),
                      kv_slots=self.pools.blocks[0] * self.pools.block_size)
        self.spawn(self._steps(), "steps")

    def on_peer(self, instance: str, kind: str, up: bool) -> None:
        """Open sequences anew at a restarted drafter or verifier; without memory or device there is no going on."""
        if kind in ("executor", "allocator") and instance in self.site.edges.values() and not up:
            raise PeerRestarted(f"{instance} died, and with it the KV of every sequence")
        if up and instance in self.site.edges.values() and kind in ("drafter", "verifier"):
            self.reopen.add(kind)
            self.wake.set()
        if kind == "tokenizer" and not up:
            for sequence in self.known.values():
                if sequence.tokenizer == instance:
                    sequence.orphaned = time.monotonic()
                    self.orphans.append(sequence)
            asyncio.get_running_loop().call_later(self.options.orphan_grace + 0.1, self.wake.set)

    # ---- inboxes

    def on_admit(self, message: Admit) -> None:
        """Append; the next plan reads it."""
        self.admitted.append((message, self.sender))
        self.wake.set()

    def on_cancel(self, message: Cancel) -> None:
        """Append; the next plan reads it. Unknown ids are remembered, for the cancel may overtake the admission."""
        self.cancelled[message.request] = message.reason
        self.wake.set()

    def on_inspect(self, message: Inspect) -> Report:
        """Facts for an operator."""
        return Report(self.facts())

    def facts(self) -> dict[str, Any]:
        """Queues, steps and where their time went."""
        return {"waiting": len(self.waiting), "running": len(self.running), "flight": len(self.flight), **self.clock}

    # ---- the step loop

    async def _steps(self) -> None:
        """The one activity: launch while a step can be planned, else finish the oldest in flight, else wait."""
        while True:
            self._intake()
            if self.reopen:
                self._open_anew()
            began = time.perf_counter()
            step = self._plan() if len(self.flight) <= self._ahead() else None
            self.clock["plan_s"] += time.perf_counter() - began
            if step is not None and await self._launch(step):
                self.flight.append(step)
            elif self.flight:
                await self._finish(self.flight.popleft())
            elif step is None and not self.admitted and not self.cancelled and not self.reopen:
                self.wake.clear()
                await self.wake.wait()

    def _ahead(self) -> int:
        """Steps that may be in flight while another is planned: none if tokens must be known on the host first."""
        if not self.verifier.device or (self.drafter.most and self.drafter.lag == 0):
            return 0
        return self.options.ahead

    def _intake(self) -> None:
        """Take what has arrived: requests, cancels, the end of a grace."""
        admitted, self.admitted = self.admitted, []
        for message, tokenizer in admitted:
            self._admit(message, tokenizer)
        if self.cancelled:
            self._take_cancels()
        if self.early or self.orphans:
            self._forget()

    def _forget(self) -> None:
        """End what outlived its grace: orphaned requests, cancels whose request never came."""
        now = time.monotonic()
        for sequence in [s for s in self.orphans if not s.orphaned or now > s.orphaned + self.options.orphan_grace]:
            self.orphans.remove(sequence)
            if sequence.orphaned and self.known.get(sequence.request) is sequence:
                self._end(sequence, "cancelled")
        for request in [r for r, until in self.early.items() if until < now]:
            del self.early[request]

    def _take_cancels(self) -> None:
        cancelled, self.cancelled = self.cancelled, {}
        for request, reason in cancelled.items():
            sequence = self.known.get(request)
            if sequence is None:
                self.early[request] = time.monotonic() + self.options.orphan_grace
            elif sequence.flight:
                sequence.cancelled = reason  # ended when its steps have ended
            else:
                self._end(sequence, "cancelled")

    def _admit(self, message: Admit, tokenizer: str) -> None:
        if self.early.pop(message.request, None) is not None:
            self._refuse(tokenizer, message.request, "cancelled", "the request was cancelled before it was admitted")
            return
        ids = unpack(message.ids).tolist()
        sequence = self.known.get(message.request)
        if sequence is not None and sequence.ids[:len(ids)] == ids and not sequence.cancelled:
            sequence.tokenizer, sequence.orphaned = tokenizer, 0.0  # taken over; what the new one lacks is re-sent
            self._emit([(sequence, len(ids) - sequence.prompt_length, sequence.ids[len(ids):], "")])
            return
        if sequence is not None:  # it went another way than the newcomer says; the newcomer is right
            del self.known[sequence.request]
            sequence.cancelled = "replaced"
            if not sequence.flight:
                self._drop(sequence, "cancelled")
        if (problem := self._problem(message, ids)) is not None:
            self._refuse(tokenizer, message.request, *problem)
            return
        sampling = message.sampling
        stops = frozenset(sampling.stop_ids) | (frozenset() if sampling.ignore_eos else frozenset(self.model.eos))
        sequence = Sequence(message, ids, tokenizer, stops)
        if finish := sequence.finish():
            self._emit([(sequence, sequence.generated, [], finish)])
            return
        self.known[message.request] = sequence
        self.waiting.append(sequence)

    def _problem(self, message: Admit, ids: list[int]) -> tuple[str, str, float] | None:
        """Why a request cannot be served: kind, reason, seconds after which trying again may help."""
        most = self.pools.blocks[0] * self.pools.block_size
        end = message.prompt_length + message.sampling.max_tokens
        if not ids or message.prompt_length < 1:
            return "invalid", "the prompt has no tokens", 0.0
        if min(ids) < 0 or max(ids) >= self.model.vocabulary:
            return "invalid", f"token ids must lie in 0..{self.model.vocabulary - 1}", 0.0
        if end > self.model.context:
            return "too_long", (f"prompt of {message.prompt_length} and max_tokens {message.sampling.max_tokens} exceed "
                                f"the model's context of {self.model.context} tokens"), 0.0
        if end > most:
            return "too_long", f"the request may need {end} KV slots, the pool has {most}", 0.0
        if len(self.waiting) >= self.options.max_waiting:
            return "overloaded", f"{len(self.waiting)} requests wait already", 1.0
        return None

    # ---- planning

    def _plan(self) -> Step | None:
        """Rows for everyone who runs, then for those who can begin; None if nobody has a row to compute."""
        parts: list[Part] = []
        room = self.options.max_step_tokens
        chunk = self.options.max_chunk or room
        ready = [s for s in self.running if s.uncomputed >= 1 and s.left >= 1 and not s.cancelled]
        # Decoding first (one row each), so that a long prefill never holds the others up.
        for sequence in [*(s for s in ready if s.uncomputed == 1), *(s for s in ready if s.uncomputed > 1)]:
            if room < 1:
                break
            parts.append(Part(sequence, min(sequence.uncomputed, chunk, room)))
            room -= parts[-1].count
        begin = len(self.running) < self.options.max_running and room > 0 and self.waiting
        for sequence in self.policy.order(self.waiting) if begin else ():
            if room < 1 or len(self.running) >= self.options.max_running or not self._fits(sequence):
                break
            self._begin(sequence)
            parts.append(Part(sequence, min(sequence.uncomputed, chunk, room)))
            room -= parts[-1].count
        if not parts:
            return None
        self.number += 1
        return Step(self.number, parts)

    def _fits(self, sequence: Sequence) -> bool:
        """Whether the pool could hold the running sequences' present lengths and this one."""
        size = self.pools.block_size
        used = sum(-(-max(s.granted, s.total) // size) for s in self.running)
        return used + -(-(sequence.total + 1) // size) <= self.pools.blocks[0]

    def _begin(self, sequence: Sequence) -> None:
        sequence.handle = self.handles.take()
        sequence.have = len(sequence.ids)
        opening = sequence.opening()
        for kind in ("allocator", "executor", "drafter", "verifier"):
            self.tell(self.peer(kind), opening)
        self.waiting.remove(sequence)
        self.running.append(sequence)

    # ---- launching

    async def _launch(self, step: Step) -> bool:
        """Draft, reserve, page and execute; false if memory was short and the step was given up."""
        began = step.began = time.perf_counter()
        await self._draft(step)
        if not await self._reserve(step):
            return False
        capture = self.drafter.capture if self.drafter.observes else ()
        execute = step.execute(self.changes, self._ticket, capture, reduce=not self.verifier.device)
        self.changes = []
        for part in step.parts:
            sequence = part.sequence
            sequence.flight += 1
            sequence.planned += part.count
            if part.last and not part.tokens and self._ahead() and sequence.left > 1:
                sequence.pending = (step.number, part.logit_row)
                sequence.unknown += 1
                part.promised = True
            self.policy.served(sequence, part.rows)
        self.clock["rows"] += sum(p.rows for p in step.parts)
        step.executed = await self.ask(self.peer("executor"), execute, Executed, self.options.ask_timeout)
        if step.predicting:
            step.verify = step.to_verify(step.executed)
            step.verified = self.site.post.request(
                self.site.instance, self.peer("verifier"), step.verify, self.options.ask_timeout)
        self.clock["ask_s"] += time.perf_counter() - began
        trace.point("scheduler", "launch", began)
        return True

    async def _draft(self, step: Step) -> None:
        parts = step.predicting
        if not parts or "drafter" in self.reopen:
            return
        budgets = [0] * len(parts)
        if self.drafter.most and not self.flight:
            wanted = self.length.budgets([p.sequence for p in parts], self.drafter.most)
            # A draft beyond the last token that may still be generated would be verified for nothing.
            budgets = [max(0, min(w, self.drafter.most, p.sequence.left - 1, 63)) if p.count == 1 else 0
                       for w, p in zip(wanted, parts, strict=True)]
        try:
            message = step.draft(budgets)
            drafted = await self.ask(self.peer("drafter"), message, Drafted, self.options.ask_timeout)
        except AskFailed as cause:
            self.log.warning("no drafts", cause=str(cause))
            self.reopen.add("drafter")
            return
        for handle in step.take_drafts(drafted):
            self._open_at("drafter", (s for s in self.running if s.handle == handle))
        self.clock["drafted"] += sum(len(p.tokens) for p in parts)

    async def _reserve(self, step: Step) -> bool:
        """Get slots for the step. If memory is short: wait for what is in flight, drop drafts, preempt."""
        self._ticket = 0
        while (message := step.reserve(self.options.reserve_ahead)) is not None:
            reserved = await self.ask(self.peer("allocator"), message, Reserved, self.options.ask_timeout)
            self._take_grants(step, message.sequences, reserved)
            if reserved.moves:
                page = Page(step.number, reserved.moves)
                self._ticket = (await self.ask(self.peer("pager"), page, Paged, self.options.ask_timeout)).ticket
            if not reserved.short:
                return True
            if self.flight:
                return False  # finish it first: it may end sequences, and no victim may be in flight
            if any(p.tokens for p in step.parts):
                for part in step.parts:
                    part.tokens, part.parents = [], None
                continue
            victim = self.policy.victim(self.running)
            self._preempt(victim)
            step.parts = [p for p in step.parts if p.sequence is not victim]
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
        self.changes += unpack(reserved.changes).tolist()

    def _preempt(self, victim: Sequence) -> None:
        """Give a sequence's memory back; it will be computed anew from its ids."""
        self.log.debug("preempted", request=victim.request.hex(), length=victim.total)
        self.clock["preempted"] += 1
        self._close([victim], "preempted")
        self.running.remove(victim)
        victim.rewind()
        self.waiting.insert(0, victim)

    # ---- finishing

    async def _finish(self, step: Step) -> None:
        """Await the verdict, apply it in one go, observe, commit, emit."""
        began = time.perf_counter()
        verified = await self._verdict(step) if step.verified is not None else None
        self.clock["wait_s"] += time.perf_counter() - began
        began = time.perf_counter()
        kept, ids, emitted, finished = self._apply(step, verified)
        if self.drafter.observes and "drafter" not in self.reopen:
            try:
                await self.ask(self.peer("drafter"), step.observe(kept, ids), Observed, self.options.ask_timeout)
            except AskFailed:
                self.reopen.add("drafter")
        commit = step.commit(kept, ids)
        for kind in ("allocator", "executor", "drafter"):
            self.tell(self.peer(kind), commit)
        for part in step.parts:
            if part.last:
                part.sequence.have = len(part.sequence.ids)
        if emitted:
            self._emit(emitted)
        for sequence, finish in finished:
            self._end(sequence, finish, told=True)
        for part in step.parts:
            if part.sequence.cancelled and not part.sequence.flight and part.sequence.handle >= 0:
                self._end(part.sequence, "cancelled")
        now = time.perf_counter()
        self.clock["apply_s"] += now - began
        self.clock["wall_s"] += now - step.began
        self.clock["steps"] += 1
        trace.point("scheduler", "finish", began)

    async def _verdict(self, step: Step) -> Verified:
        """The verifier's answer; a verifier in a cell of its own may die and is asked again by its successor."""
        assert step.verified is not None and step.verify is not None
        ends = time.monotonic() + self.options.ask_timeout
        while True:
            try:
                return await step.verified
            except PeerRestarted:
                if self.verifier.device or time.monotonic() > ends:
                    raise
            self.wake.clear()
            while "verifier" not in self.reopen:
                await asyncio.wait_for(self.wake.wait(), max(0.1, ends - time.monotonic()))
                self.wake.clear()
            self._open_anew()
            self.wake.set()
            step.verified = self.site.post.request(
                self.site.instance, self.peer("verifier"), step.verify, self.options.ask_timeout)

    def _apply(
        self, step: Step, verified: Verified | None,
    ) -> tuple[list[list[int]], list[list[int]], list[tuple[Sequence, int, list[int], str]], list[tuple[Sequence, str]]]:
        """Take the verdict into the sequences, without awaiting: kept rows, committed ids, what to emit, who ended."""
        columns = [unpack(c).tolist() for c in (verified.offsets, verified.ids, verified.kept_offsets, verified.kept)] \
            if verified is not None else [[0], [], [0], []]
        offsets, all_ids, kept_offsets, all_kept = columns
        kept: list[list[int]] = []
        committed: list[list[int]] = []
        emitted: list[tuple[Sequence, int, list[int], str]] = []
        finished: list[tuple[Sequence, str]] = []
        r = 0
        for part in step.parts:
            sequence = part.sequence
            sequence.flight -= 1
            rows, ids, finish = [], [], ""
            if part.last:
                rows = all_kept[kept_offsets[r]:kept_offsets[r + 1]]
                ids = all_ids[offsets[r]:offsets[r + 1]]
                r += 1
                sequence.unknown -= part.promised
                if sequence.handle < 0 or sequence.cancelled or sequence.finish():
                    ids, rows = [], []  # planned ahead of a stop: the token is no one's
                else:
                    index = sequence.generated
                    ids, finish = sequence.append(ids)
                    rows = rows[:max(0, len(ids) - 1)]
                    self.clock["accepted"] += len(rows)
                    emitted.append((sequence, index, ids, finish))
            sequence.computed = part.start + part.count + len(rows)
            if not sequence.flight:
                sequence.planned = sequence.computed
            if finish:
                finished.append((sequence, finish))
            kept.append(rows)
            committed.append(ids)
        return kept, committed, emitted, finished

    def _end(self, sequence: Sequence, finish: str, told: bool = False) -> None:
        """A request is over. With steps in flight its memory is given back when they have ended."""
        if sequence.flight:
            sequence.cancelled = sequence.cancelled or finish
            if told:
                self.known.pop(sequence.request, None)
            return
        if not told and self.known.get(sequence.request) is sequence:
            self._emit([(sequence, sequence.generated, [], finish)])
        self._drop(sequence, "cancelled" if finish == "cancelled" else "finished")

    def _drop(self, sequence: Sequence, reason: str) -> None:
        if self.known.get(sequence.request) is sequence:
            del self.known[sequence.request]
        if sequence.handle >= 0:
            self._close([sequence], reason)
            self.running.remove(sequence)
            sequence.rewind()
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    # ---- telling

    def _close(self, sequences: list[Sequence], reason: str) -> None:
        message = Close(pack([s.handle for s in sequences]), reason)
        for kind in ("allocator", "executor", "drafter", "verifier"):
            self.tell(self.peer(kind), message)
        for sequence in sequences:
            self.handles.give(sequence.handle)

    def _emit(self, items: list[tuple[Sequence, int, list[int], str]]) -> None:
        """One Emit for each tokenizer concerned."""
        for tokenizer in {s.tokenizer for s, *_ in items}:
            mine = [i for i in items if i[0].tokenizer == tokenizer]
            offsets = [0]
            for _, _, ids, _ in mine:
                offsets.append(offsets[-1] + len(ids))
            self.tell(tokenizer, Emit(
                tuple(s.request for s, *_ in mine), pack([index for _, index, _, _ in mine]), pack(offsets),
                pack([t for _, _, ids, _ in mine for t in ids]), tuple(finish for *_, finish in mine)))

    def _refuse(self, tokenizer: str, request: bytes, kind: str, reason: str, retry_after: float = 0.0) -> None:
        self.tell(tokenizer, Refuse(request, kind, reason, retry_after))

    def _open_anew(self) -> None:
        kinds, self.reopen = self.reopen, set()
        for kind in kinds:
            self._open_at(kind, self.running)

    def _open_at(self, kind: str, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            if sequence.handle >= 0:
                self.tell(self.peer(kind), sequence.opening())
                if kind == "drafter":
                    sequence.have = len(sequence.ids)


__all__ = ["CONTROL", "Length", "Message", "Policy", "Scheduler", "SchedulerOptions"]
