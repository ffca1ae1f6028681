"""The gateway owns client connections and the ledger of accepted requests and tokens sent.

It does not know text rules, scheduling or how its door reaches clients.
"""

import asyncio
import secrets
import time
from typing import Any, ClassVar

from antiphon.actors.columns import pack, unpack
from antiphon.actors.protocol import (
    Accepted,
    Cancel,
    Delta,
    Generate,
    Inspect,
    Refuse,
    Report,
    Sampling,
)
from antiphon.actors.requests import ClientKey, Entry, Quarantine
from antiphon.runtime.actor import Actor, ActorSite
from antiphon.runtime.errors import AskFailed
from antiphon.runtime.message import CONTROL
from antiphon.runtime.plugin import O, Options, Plugin


class Output:
    """New output of one request for its client."""

    __slots__ = ("finish", "id", "ids", "index", "text")

    def __init__(self, request: bytes, index: int, ids: list[int], text: str, finish: str):
        self.id, self.index, self.ids, self.text, self.finish = request, index, ids, text, finish


class Door(Plugin[O]):
    """Contract of a ``door``: how clients reach the gateway. Its ``open`` gets the Gateway, whose methods it calls."""

    kind: ClassVar[str] = "door"

    async def open(self, gate: "Gateway") -> None:
        """Begin to listen."""
        raise NotImplementedError

    async def close(self) -> None:
        """Stop listening; what was sent may still leave."""
        raise NotImplementedError

    def accepted(self, client: ClientKey, request: bytes, prompt: bytes, seed: int) -> None:
        """A request's prompt is tokenized."""
        raise NotImplementedError

    def deliver(self, client: ClientKey, outputs: list[Output]) -> bool:
        """Send output; false: the client takes none now and will ask with ``Gateway.flush``."""
        raise NotImplementedError

    def refused(self, client: ClientKey, request: bytes, kind: str, reason: str, retry_after: float) -> None:
        """A request will not be served."""
        raise NotImplementedError


class GatewayOptions(Options, frozen=True):
    """Limits per tenant and for clients."""

    max_open: int = 1024  # requests of one tenant at once
    max_prompt: int = 32 << 20  # bytes of text or ids in one request
    client_grace: float = 15.0  # seconds a silent client's requests live on
    tenant: str = "local"


class Gateway(Actor[GatewayOptions]):
    """Takes requests, keeps the ledger, replays after a death, hands output to the door."""

    kind = "gateway"
    plugs = ("door",)
    uses = ("tokenizer",)

    def __init__(self, options: GatewayOptions, site: ActorSite):
        super().__init__(options, site)
        self.door: Door[Any] = site.plugin("door")
        self.entries: dict[bytes, Entry] = {}
        self.clients: dict[ClientKey, set[bytes]] = {}
        self.quarantine = Quarantine()
        self.draining = False
        self.down: set[str] = set()  # instances whose cell is not up
        self.tally = {"accepted": 0, "finished": 0, "refused": 0, "cancelled": 0, "replayed": 0, "poison": 0,
                      "tokens": 0}

    async def start(self) -> None:
        """Open the door."""
        await self.door.open(self)

    async def stop(self, deadline: float) -> None:
        """Refuse what is new, let what is open finish until the deadline, then refuse the rest."""
        self.draining = True
        ends = time.monotonic() + max(0.0, deadline - 0.5)
        while self.entries and time.monotonic() < ends:
            await asyncio.sleep(0.02)
        for entry in list(self.entries.values()):
            self._refuse(entry, "shutting_down", "the server stopped before the request was finished", 5.0)
        await self.door.close()

    def facts(self) -> dict[str, Any]:
        """Clients, requests and what became of them."""
        return {"clients": len(self.clients), "open": len(self.entries),
                "suspects": len(self.quarantine.suspects) + (self.quarantine.trying is not None),
                "ready": self.ready(), **self.tally}

    def ready(self) -> bool:
        """Whether requests can be served now."""
        return not self.down and not self.draining

    # ---- called by the door

    def generate(self, client: ClientKey, request: bytes, text: str | None, ids: bytes | None, raw: bool,
                 sampling: Sampling, seed: int | None) -> None:
        """Take a new request, or refuse it."""
        entry = Entry(client, request, self.options.tenant, sampling, secrets.randbits(63) if seed is None else seed)
        if (problem := self._problem(client, request, text, ids, sampling, entry.seed)) is not None:
            self.tally["refused"] += 1
            self.door.refused(client, request, *problem)
            return
        entry.generate = Generate(request, entry.tenant, text, ids, raw, sampling, entry.seed)
        self._enter(entry)
        self._send_on(entry)

    def resume(self, client: ClientKey, request: bytes, prompt: bytes, done: bytes, sampling: Sampling,
               seed: int) -> None:
        """Take up a request that another incarnation had accepted, or one that still runs here."""
        known = self.entries.get(request)
        if known is not None and known.client == client:
            known.sent = min(len(known.ids), len(done) // 4)  # its output is sent again from there
            known.text = known.finish = ""
            if not known.accepted:
                return  # still with the tokenizer; the client will hear
            if len(known.ids) >= known.sent:  # text of ids that were on their way is rebuilt by a replay
                known.ids = known.ids[:known.sent]
                self._send_on(known)
            return
        entry = Entry(client, request, self.options.tenant, sampling, seed)
        problem = self._problem(client, request, None, prompt, sampling, seed)
        if problem is None and len(done) % 4:
            problem = "invalid", "ids so far are not packed int32", 0.0
        if problem is not None:
            self.tally["refused"] += 1
            self.door.refused(client, request, *problem)
            return
        entry.prompt, entry.accepted = prompt, True
        entry.ids = unpack(done).tolist()
        entry.sent = len(entry.ids)
        self._enter(entry)
        self._send_on(entry)

    def cancel(self, client: ClientKey, request: bytes) -> None:
        """The caller wants no more; idempotent."""
        entry = self.entries.get(request)
        if entry is None or entry.client != client or entry.cancelled:
            return
        entry.cancelled = True
        if entry.held or entry.paused or self.down or entry in self.quarantine.suspects:
            self._finish(entry, "cancelled")  # nobody else has it
        else:
            self.tell(self.peer("tokenizer"), Cancel(request), CONTROL)

    def gone(self, client: ClientKey) -> None:
        """A client left or fell silent: nobody waits for its requests."""
        for request in list(self.clients.pop(client, ())):
            entry = self.entries.pop(request, None)
            if entry is not None:
                self.tally["cancelled"] += 1
                self.tell(self.peer("tokenizer"), Cancel(request), CONTROL)
                self._left(entry)

    def flush(self, client: ClientKey) -> None:
        """The client takes output again."""
        self._deliver(client, [e for r in self.clients.get(client, ()) if (e := self.entries.get(r)) is not None])

    async def stats(self) -> dict[str, Any]:
        """Facts of every actor of the deployment; one that does not answer is named."""
        post = self.site.post
        found: dict[str, Any] = {self.site.instance: self.facts(), "post": {post.cell: dict(post.counters)}}
        for instance in [i for i in post.where if not i.startswith("@") and i != self.site.instance]:
            try:
                found[instance] = (await self.ask(instance, Inspect(), Report, 2.0)).facts
            except AskFailed as cause:
                found[instance] = {"error": str(cause)}
        return found

    # ---- messages

    def on_accepted(self, message: Accepted) -> None:
        """Enter the prompt's ids into the ledger and tell the client."""
        entry = self.entries.get(message.request)
        if entry is None:
            self.tell(self.peer("tokenizer"), Cancel(message.request), CONTROL)
            return
        entry.prompt, entry.accepted, entry.generate = message.ids, True, None
        self.door.accepted(entry.client, entry.id, entry.prompt, entry.seed)

    def on_delta(self, message: Delta) -> None:
        """Enter new tokens and send them on; what is already known or comes out of order is dropped."""
        offsets, index, ids = unpack(message.offsets), unpack(message.index), unpack(message.ids)
        touched: dict[ClientKey, list[Entry]] = {}
        for r, request in enumerate(message.requests):
            entry = self.entries.get(request)
            if entry is None or int(index[r]) != len(entry.ids):
                continue
            new = ids[offsets[r]:offsets[r + 1]].tolist()
            entry.ids += new
            entry.text += message.texts[r]
            self.tally["tokens"] += len(new)
            finish = message.finish[r]
            if finish == "cancelled" and not entry.cancelled:
                self._paused(entry)
                finish = ""
            entry.finish = finish
            touched.setdefault(entry.client, []).append(entry)
            self._try_next(entry)
        for client, entries in touched.items():
            self._deliver(client, entries)

    def on_refuse(self, message: Refuse) -> None:
        """The tokenizer or the scheduler will not serve it."""
        if (entry := self.entries.get(message.request)) is not None:
            self._refuse(entry, message.kind, message.reason, message.retry_after)

    def on_inspect(self, message: Inspect) -> Report:
        """Facts for an operator."""
        return Report(self.facts())

    # ---- deaths

    def on_peer(self, instance: str, kind: str, up: bool) -> None:
        """Replay the ledger when the scheduler or the tokenizer comes back."""
        if kind not in ("scheduler", "tokenizer"):
            return
        (self.down.discard if up else self.down.add)(instance)
        if kind == "scheduler" and not up:
            suspects = self.quarantine.suspects
            open_entries = [e for e in self.entries.values() if not (e.held or e.paused or e in suspects)]
            for entry in [e for e in open_entries if e.cancelled]:
                open_entries.remove(entry)
                self._finish(entry, "cancelled")
            poison = self.quarantine.death(open_entries)
            if poison is not None:
                self.tally["poison"] += 1
                self.log.error("poison request refused", request=poison.id.hex())
                self._refuse(poison, "poison", "this request ended its server process twice, the second time alone", 0.0)
        elif kind == "scheduler":
            if self.quarantine.active:
                self._try_suspect()
        elif kind == "tokenizer" and up and not self.quarantine.active:
            for entry in list(self.entries.values()):
                self._send_on(entry)

    def _try_suspect(self) -> None:
        """Replay the next suspect alone; with none left, everything that waited goes on."""
        if (entry := self.quarantine.next()) is not None:
            self.tally["replayed"] += 1
            self._send_on(entry)
            return
        for waiting in list(self.entries.values()):
            if waiting.held or waiting.paused:
                waiting.held = waiting.paused = False
                self._send_on(waiting)

    def _try_next(self, entry: Entry) -> None:
        """If the suspect being tried has passed, stop it until the others have, and try the next."""
        if not self.quarantine.cleared(entry):
            return
        if entry.finish or not self.quarantine.suspects:
            self._try_suspect()
        else:  # its end comes back as "cancelled" and then the next one begins
            self.quarantine.trying, entry.paused = entry, True
            self.tell(self.peer("tokenizer"), Cancel(entry.id, "paused"), CONTROL)

    def _paused(self, entry: Entry) -> None:
        """A request that nobody cancelled has stopped: a suspect that passed, or one whose orphan grace ran out."""
        if entry is self.quarantine.trying and entry.paused:
            self.quarantine.trying = None
            self._try_suspect()
        else:
            self._send_on(entry)

    # ---- the ledger

    def _problem(self, client: ClientKey, request: bytes, text: str | None, ids: bytes | None, sampling: Sampling,
                 seed: int) -> tuple[str, str, float] | None:
        """Why a request is refused at the door: kind, reason, seconds."""
        length = len(text or "") + len(ids or b"")
        checks: list[tuple[bool, str, str, float]] = [
            (self.draining, "shutting_down", "the server is stopping", 5.0),
            (len(request) != 16, "invalid", "a request id is 16 random bytes", 0.0),
            (request in self.entries, "duplicate", "a request with this id is open", 0.0),
            ((text is None) == (ids is None), "invalid", "give either text or token ids", 0.0),
            (not length, "invalid", "the prompt is empty", 0.0),
            (length > self.options.max_prompt, "too_long",
             f"the prompt has {length} bytes; at most {self.options.max_prompt} are taken", 0.0),
            (len(ids or b"") % 4 != 0, "invalid", "token ids are packed int32", 0.0),
            (sampling.max_tokens < 1, "invalid", f"max_tokens is {sampling.max_tokens}; it must be at least 1", 0.0),
            (not 0.0 <= sampling.temperature <= 100.0, "invalid",
             f"temperature is {sampling.temperature}; it must lie in 0..100 (0 is greedy)", 0.0),
            (sampling.top_k < 0, "invalid", f"top_k is {sampling.top_k}; it must be 0 (off) or more", 0.0),
            (not 0.0 < sampling.top_p <= 1.0, "invalid",
             f"top_p is {sampling.top_p}; it must lie above 0 and at most at 1 (off)", 0.0),
            (not 0 <= seed < 1 << 64, "invalid", f"seed is {seed}; it must lie in 0..2**64 - 1", 0.0),
            (sampling.max_tokens > 1 << 24, "invalid", "max_tokens is beyond any context", 0.0),
            (len(sampling.stop_ids) > 1024, "invalid", "at most 1024 stop ids", 0.0),
            (len(self.entries) >= self.options.max_open, "overloaded",
             f"{len(self.entries)} requests are open; at most {self.options.max_open} are taken", 1.0),
        ]
        return next(((kind, reason, after) for wrong, kind, reason, after in checks if wrong), None)

    def _enter(self, entry: Entry) -> None:
        self.entries[entry.id] = entry
        self.clients.setdefault(entry.client, set()).add(entry.id)
        self.tally["accepted"] += 1

    def _send_on(self, entry: Entry) -> None:
        """Send a request to the tokenizer, or hold it while suspects are tried."""
        if self.quarantine.active and entry is not self.quarantine.trying:
            entry.held = True
        elif entry.generate is not None:
            self.tell(self.peer("tokenizer"), entry.generate)
        else:
            self.tell(self.peer("tokenizer"), entry.resume(pack(entry.ids)))

    def _deliver(self, client: ClientKey, entries: list[Entry]) -> None:
        """Hand the door what the client has not had; the ledger keeps what it does not take."""
        outputs = [Output(e.id, e.sent, e.ids[e.sent:], e.text, e.finish)
                   for e in entries if len(e.ids) > e.sent or e.text or e.finish]
        if not outputs or not self.door.deliver(client, outputs):
            return
        for entry in entries:
            entry.sent, entry.text = len(entry.ids), ""
            if entry.finish:
                self._remove(entry)
                self.tally["cancelled" if entry.finish == "cancelled" else "finished"] += 1

    def _finish(self, entry: Entry, finish: str) -> None:
        entry.finish = finish
        self._left(entry)
        self._deliver(entry.client, [entry])

    def _refuse(self, entry: Entry, kind: str, reason: str, retry_after: float) -> None:
        self.tally["refused"] += 1
        self._remove(entry)
        self.door.refused(entry.client, entry.id, kind, reason, retry_after)
        self._left(entry)

    def _remove(self, entry: Entry) -> None:
        self.entries.pop(entry.id, None)
        if (requests := self.clients.get(entry.client)) is not None:
            requests.discard(entry.id)

    def _left(self, entry: Entry) -> None:
        """A request has gone: the quarantine must not wait for it."""
        if self.quarantine.forget(entry) and not self.down:
            self._try_suspect()
