"""The roster knows every sequence of a scheduler: who waits, who runs, who arrives and who leaves.

It does not know how steps are composed; the step loop calls it between steps.
"""

import time
from collections.abc import Iterable
from typing import Any

from antiphon.actors.columns import pack, unpack
from antiphon.actors.model import Facts
from antiphon.actors.protocol import Admit, Close, Configured, Emit, Refuse
from antiphon.actors.sequences import Handles, Sequence
from antiphon.runtime.actor import Actor

HOLDERS = ("allocator", "executor", "drafter", "verifier")  # of sequence state


class Roster:
    """Queues of one scheduler. Its inboxes are only appended to until ``intake`` reads them."""

    def __init__(self, actor: Actor[Any], max_waiting: int, grace: float):
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.admitted: list[tuple[Admit, str]] = []  # inbox: with the tokenizer it came from
        self.cancelled: dict[bytes, str] = {}  # inbox: request -> reason
        self.readied: list[int] = []  # inbox: sequences that need no longer be held
        self.available = 0  # blocks that the allocator could still give when it was asked last
        self.changes: list[int] = []  # block-table changes not yet told to the executor, in fours
        self._actor = actor
        self._max_waiting = max_waiting
        self._grace = grace  # seconds
        self._known: dict[bytes, Sequence] = {}
        self._handles = Handles()
        self._early: dict[bytes, float] = {}  # cancels of unknown ids -> when to forget them
        self._orphans: list[Sequence] = []
        self._lost: dict[str, float] = {}  # tokenizers that died -> when

    def know(self, model: Facts, pools: Configured) -> None:
        """Learn the model's and the memory's limits, before the first ``intake``."""
        self.model, self.pools = model, pools

    @property
    def called(self) -> bool:
        """Whether an inbox holds something."""
        return bool(self.admitted or self.cancelled or self.readied)

    @property
    def orphaned(self) -> bool:
        """Whether sequences outlive the loss of their tokenizer."""
        return bool(self._orphans)

    # ---- arriving

    def intake(self) -> None:
        """Take what has arrived: requests, then cancels, which may have overtaken them, then the end of a grace."""
        admitted, self.admitted = self.admitted, []
        for message, tokenizer in admitted:
            self._admit(message, tokenizer)
        if self.cancelled:
            self._take_cancels()
        if self.readied:
            readied, self.readied = set(self.readied), []
            for sequence in self.running:
                sequence.held = sequence.held and sequence.handle not in readied
        if self._early or self._orphans:
            self._forget()

    def lost(self, tokenizer: str) -> None:
        """A tokenizer died: its requests are orphans until they are taken over."""
        self._lost[tokenizer] = time.monotonic()
        for sequence in self._known.values():
            if sequence.tokenizer == tokenizer:
                self._orphan(sequence)

    def found(self, tokenizer: str) -> None:
        """A tokenizer is back; what it asks for is in good hands."""
        self._lost.pop(tokenizer, None)

    def _orphan(self, sequence: Sequence) -> None:
        if not sequence.orphaned:
            self._orphans.append(sequence)
        sequence.orphaned = self._lost[sequence.tokenizer]

    def _admit(self, message: Admit, tokenizer: str) -> None:
        if self._early.pop(message.request, 0.0) > time.monotonic():
            self._refuse(tokenizer, message.request, "cancelled", "the request was cancelled before it was admitted")
            return
        ids = unpack(message.ids).tolist()
        sequence = self._known.get(message.request)
        if sequence is not None and sequence.continues(message, ids):
            sequence.tokenizer, sequence.orphaned = tokenizer, 0.0  # taken over; what the new one lacks is re-sent
            self.emit([(sequence, len(ids) - sequence.prompt_length, sequence.ids[len(ids):], "")])
            return
        if sequence is not None:  # it goes another way than the newcomer says, or is about to end
            del self._known[sequence.request]
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
            self.emit([(sequence, sequence.generated, [], finish)])
            return
        self._known[message.request] = sequence
        self.waiting.append(sequence)
        if tokenizer in self._lost:
            self._orphan(sequence)

    def _problem(self, message: Admit, ids: list[int]) -> tuple[str, str, float] | None:
        """Why a request cannot be served: kind, reason, seconds after which trying again may help."""
        most = self.pools.blocks[0] * self.pools.block_size
        end = message.prompt_length + message.sampling.max_tokens
        if message.prompt_length < 1:
            return "invalid", "the prompt has no tokens", 0.0
        if min(ids) < 0 or max(ids) >= self.model.vocabulary:
            return "invalid", f"token ids must lie in 0..{self.model.vocabulary - 1}", 0.0
        if end > self.model.context:
            return "too_long", (f"prompt of {message.prompt_length} and max_tokens {message.sampling.max_tokens} "
                                f"exceed the model's context of {self.model.context} tokens"), 0.0
        if end > most:
            return "too_long", f"the request may need {end} KV slots, the pool has {most}", 0.0
        if len(self.waiting) >= self._max_waiting:
            return "overloaded", f"{len(self.waiting)} requests wait already", 1.0
        return None

    def _take_cancels(self) -> None:
        cancelled, self.cancelled = self.cancelled, {}
        for request, reason in cancelled.items():
            sequence = self._known.get(request)
            if sequence is None:  # it may have overtaken the admission
                self._early[request] = time.monotonic() + self._grace
            elif not sequence.cancelled:
                self.end(sequence, "stop" if reason == "stop" else "cancelled")

    def _forget(self) -> None:
        """End what outlived its grace: orphaned requests, cancels whose request never came."""
        now = time.monotonic()
        for sequence in [s for s in self._orphans if not s.orphaned or now > s.orphaned + self._grace]:
            self._orphans.remove(sequence)
            if sequence.orphaned and self._known.get(sequence.request) is sequence and not sequence.cancelled:
                self.end(sequence, "cancelled")
        for request in [r for r, until in self._early.items() if until < now]:
            del self._early[request]

    # ---- running

    def fits(self, sequence: Sequence) -> bool:
        """Whether the pool could hold the running sequences' present lengths and this one."""
        size = self.pools.block_size
        used = sum(-(-max(s.granted, s.total) // size) for s in self.running)
        return used + -(-(sequence.total + 1) // size) <= self.pools.blocks[0]

    def waits_for_prompt(self, sequence: Sequence) -> bool:
        """Whether a request is about to compute the prompt that this one is another sample of."""
        source = self._source(sequence)
        return source is not None and source.computed < source.prompt_length - 1

    def _source(self, sequence: Sequence) -> Sequence | None:
        source = self._known.get(sequence.like) if sequence.like else None
        return source if source is not None and not source.cancelled and sequence.resembles(source) else None

    def begin(self, sequence: Sequence) -> None:
        """Introduce a waiting sequence to all that hold sequence state."""
        sequence.handle = self._handles.take()
        source = self._source(sequence)
        opening = sequence.opening(source if source is not None and source.handle >= 0 else None)
        for kind in HOLDERS:
            self._actor.tell(self._actor.peer(kind), opening)
        sequence.have = len(sequence.ids)
        self.waiting.remove(sequence)
        self.running.append(sequence)

    def open_at(self, kind: str, sequences: Iterable[Sequence]) -> None:
        """Tell one kind of actor of sequences as they are now."""
        for sequence in sequences:
            self._actor.tell(self._actor.peer(kind), sequence.opening())
            if kind == "drafter":
                sequence.have = len(sequence.ids)

    def preempt(self, victim: Sequence) -> None:
        """Give a running sequence's memory back; it will be computed anew from its ids."""
        self._close(victim, "preempted")
        victim.rewind()
        self.waiting.insert(0, victim)

    # ---- leaving

    def end(self, sequence: Sequence, finish: str, told: bool = False) -> None:
        """A request is over. With steps in flight its memory is given back when they have ended.

        ``told``: the tokenizer has heard already.
        """
        if told and self._known.get(sequence.request) is sequence:
            del self._known[sequence.request]
        if sequence.flight:
            sequence.cancelled = sequence.cancelled or finish
            return
        if self._known.get(sequence.request) is sequence:
            self.emit([(sequence, sequence.generated, [], finish)])
        self._drop(sequence, "cancelled" if finish == "cancelled" else "finished")

    def _drop(self, sequence: Sequence, reason: str) -> None:
        if self._known.get(sequence.request) is sequence:
            del self._known[sequence.request]
        if sequence.handle >= 0:
            self._close(sequence, reason)
            sequence.rewind()
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def _close(self, sequence: Sequence, reason: str) -> None:
        message = Close(pack([sequence.handle]), reason)
        for kind in HOLDERS:
            self._actor.tell(self._actor.peer(kind), message)
        if sequence.handle in self.changes[::4]:  # granted, but the step was given up: its index may be used anew
            fours = zip(*[iter(self.changes)] * 4, strict=True)
            self.changes = [n for four in fours if four[0] != sequence.handle for n in four]
        self._handles.give(sequence.handle)
        self.running.remove(sequence)

    # ---- telling

    def emit(self, items: list[tuple[Sequence, int, list[int], str]]) -> None:
        """One Emit for each tokenizer concerned; an item is a sequence, the ids before, the new ids, the finish."""
        tokenizers = {item[0].tokenizer for item in items}
        for tokenizer in tokenizers:
            mine = items if len(tokenizers) == 1 else [i for i in items if i[0].tokenizer == tokenizer]
            offsets = [0]
            for _, _, ids, _ in mine:
                offsets.append(offsets[-1] + len(ids))
            self._actor.tell(tokenizer, Emit(
                tuple(s.request for s, *_ in mine), pack([index for _, index, _, _ in mine]), pack(offsets),
                pack([t for _, _, ids, _ in mine for t in ids]), tuple(finish for *_, finish in mine)))

    def _refuse(self, tokenizer: str, request: bytes, kind: str, reason: str, retry_after: float = 0.0) -> None:
        self._actor.tell(tokenizer, Refuse(request, kind, reason, retry_after))
