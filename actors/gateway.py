"""The gateway owns client connections and the ledger of accepted requests and tokens sent.

It does not know text rules, scheduling or how its door reaches clients.
"""

import asyncio
import contextlib
import secrets
from typing import Any

from antiphon.actors import limits
from antiphon.actors.columns import pack, unpack
from antiphon.actors.door import Door, Output
from antiphon.actors.protocol import Accepted, Cancel, Delta, Generate, Inspect, Refuse, Report, Sampling
from antiphon.actors.requests import ClientKey, Entry, Quarantine
from antiphon.actors.upkeep import Upkeep, UpkeepOptions
from antiphon.runtime.actor import Actor, ActorSite
from antiphon.runtime.errors import AskFailed, Overloaded
from antiphon.runtime.message import CONTROL


class GatewayOptions(UpkeepOptions, frozen=True):
    """Limits per tenant and for clients."""

    max_open: int = 1024  # requests of one tenant at once
    max_prompt: int = 32 << 20  # bytes of text or ids in one request
    client_grace: float = 15.0  # seconds a silent client's requests live on
    starved_grace: float = 60.0  # seconds a client may leave output untaken before it counts as gone
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
        self.upkeep = Upkeep(self, options.tenant, options, options.max_prompt)
        self.draining = False
        self.emptied = asyncio.Event()  # no request is open
        self.down: set[str] = set()  # schedulers and tokenizers whose cell died and is not back
        post = site.post
        self.awaited = {i for i, cell in post.where.items() if cell != post.cell and not i.startswith("@")}
        self.tally = {"accepted": 0, "finished": 0, "refused": 0, "cancelled": 0, "replayed": 0, "poison": 0,
                      "tokens": 0}

    async def start(self) -> None:
        """Open the door."""
        await self.door.open(self)

    async def stop(self, deadline: float) -> None:
        """Refuse what is new, let what is open finish until the deadline, then refuse the rest."""
        self.draining = True
        if self.entries:
            self.emptied.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, deadline - 0.5)):
                    await self.emptied.wait()
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
        return not (self.down or self.awaited or self.draining)

    # ---- called by the door

    def generate(self, client: ClientKey, request: bytes, text: str | None, ids: bytes | None, raw: bool,
                 sampling: Sampling, seed: int | None, sample: int = 0, like: bytes = b"") -> None:
        """Take a new request, or refuse it. A client that asks the same once more has missed the answers so far."""
        asked = hash((text, ids, raw, sampling, seed, sample))
        known = self.entries.get(request)
        if known is not None and (known.client, known.asked) == (client, asked):
            known.told = False
            self._rewind(known, [])
            return
        effective = secrets.randbits(63) if seed is None else seed
        entry = Entry(client, request, self.options.tenant, sampling, effective, sample)
        problem = limits.problem(request, text, ids, sampling, entry.seed, self.options.max_prompt, sample)
        if (problem := self._problem(request) or problem) is not None:
            self.tally["refused"] += 1
            self.door.refused(client, request, *problem)
            return
        entry.asked = asked
        like = like if (first := self.entries.get(like)) is not None and first.client == client else b""
        entry.generate = Generate(request, entry.tenant, text, ids, raw, sampling, entry.seed, sample, like)
        self._enter(entry)

    def resume(self, client: ClientKey, request: bytes, prompt: bytes, done: bytes, sampling: Sampling,
               seed: int, sample: int = 0) -> None:
        """Take up a request that another incarnation had accepted, or one that still runs here."""
        known = self.entries.get(request)
        problem = limits.problem(request, None, prompt, sampling, seed, self.options.max_prompt, sample)
        if problem is None and (len(done) % 4 or len(done) > self.options.max_prompt):
            problem = "invalid", "ids so far are not packed int32, or too many", 0.0
        if problem is None and known is not None and known.client == client:
            known.told = True
            self._rewind(known, unpack(done).tolist())
            return
        if (problem := problem or self._problem(request)) is not None:
            self.tally["refused"] += 1
            self.door.refused(client, request, *problem)
            return
        entry = Entry(client, request, self.options.tenant, sampling, seed, sample)
        entry.prompt, entry.accepted, entry.told = prompt, True, True
        entry.ids = unpack(done).tolist()
        entry.sent = len(entry.ids)
        self._enter(entry)

    def cancel(self, client: ClientKey, request: bytes) -> None:
        """The caller wants no more; idempotent."""
        entry = self.entries.get(request)
        if entry is None or entry.client != client or entry.cancelled or entry.finish:
            return
        entry.cancelled = True
        if entry.sent_on:
            self.tell(self.peer("tokenizer"), Cancel(request), CONTROL)
        else:
            self._finish(entry, "cancelled")  # nobody else has it

    def gone(self, client: ClientKey) -> None:
        """A client left or fell silent: nobody waits for its requests."""
        for request in list(self.clients.get(client, ())):
            if (entry := self.entries.get(request)) is None:
                continue
            self.tally["cancelled"] += 1
            if entry.sent_on:
                self.tell(self.peer("tokenizer"), Cancel(request), CONTROL)
            self._remove(entry)

    def flush(self, client: ClientKey) -> None:
        """The client takes output again."""
        self._deliver(client, [self.entries[r] for r in self.clients.get(client, ())])

    async def stats(self) -> dict[str, Any]:
        """Facts of every actor of the deployment; one that does not answer is named."""
        post = self.site.post
        found: dict[str, Any] = {self.site.instance: self.facts(), "post": {post.cell: dict(post.counters)}}

        async def inspect(instance: str) -> None:
            try:
                found[instance] = (await self.ask(instance, Inspect(), Report, 2.0)).facts
            except AskFailed as cause:
                found[instance] = {"error": str(cause)}

        await asyncio.gather(*(inspect(i) for i in post.where if not i.startswith("@") and i != self.site.instance))
        return found

    # ---- messages

    def on_accepted(self, message: Accepted) -> None:
        """Enter the prompt's ids into the ledger and tell the client."""
        entry = self.entries.get(message.request)
        if entry is None:
            self.tell(self.peer("tokenizer"), Cancel(message.request), CONTROL)
            return
        entry.prompt, entry.accepted, entry.generate = message.ids, True, None
        self._tell_accepted(entry)

    def on_delta(self, message: Delta) -> None:
        """Enter new tokens and send them on; what is already known is dropped, what is missing is asked for."""
        offsets, index, ids = unpack(message.offsets), unpack(message.index), unpack(message.ids)
        touched: dict[ClientKey, list[Entry]] = {}
        for r, request in enumerate(message.requests):
            entry = self.entries.get(request)
            if entry is None or entry.finish:
                continue
            new, finish = ids[offsets[r]:offsets[r + 1]].tolist(), message.finish[r]
            if int(index[r]) != len(entry.ids):
                self._out_of_order(entry, int(index[r]) + len(new), finish)
                continue
            entry.syncing = False
            if finish == "cancelled" and not entry.cancelled:  # the text is what an end would make of half a character
                self._stopped(entry)
                continue
            entry.ids += new
            entry.text += message.texts[r]
            entry.finish = finish
            self.tally["tokens"] += len(new)
            self._try_next(entry)
            touched.setdefault(entry.client, []).append(entry)
        for client, entries in touched.items():
            self._deliver(client, entries)

    def on_refuse(self, message: Refuse) -> None:
        """The tokenizer or the scheduler will not serve it."""
        entry = self.entries.get(message.request)
        if entry is None or entry.finish:
            return
        if message.kind != "cancelled":
            self._refuse(entry, message.kind, message.reason, message.retry_after)
        elif entry.cancelled:
            self._finish(entry, "cancelled")
        else:  # a cancel was remembered that was not meant for this life of the id
            self._stopped(entry)

    def on_inspect(self, message: Inspect) -> Report:
        """Facts for an operator."""
        return Report(self.facts())

    # ---- deaths

    def on_peer(self, instance: str, kind: str, up: bool) -> None:
        """Replay the ledger when the scheduler or the tokenizer comes back."""
        if up:
            self.awaited.discard(instance)
        if kind not in ("scheduler", "tokenizer"):
            return
        if up:
            self.down.discard(instance)
            self._go_on()
            return
        self.down.add(instance)
        lost = [e for e in self.entries.values() if e.sent_on and not e.finish]
        for entry in lost:
            entry.sent_on = False
            if entry.cancelled:
                self._finish(entry, "cancelled")
        if kind == "tokenizer":
            self.quarantine.pausing = False
        elif (poison := self.quarantine.death([e for e in lost if not e.cancelled])) is not None:
            self.tally["poison"] += 1
            self.log.error("poison request refused", request=poison.id.hex())
            self._refuse(poison, "poison", "this request ended its server process twice, the second time alone", 0.0)

    def _go_on(self) -> None:
        """Send on the suspect to try; with none left, everything that waits."""
        if self.down:
            return
        if (entry := self.quarantine.trying or self.quarantine.next()) is not None:
            self.tally["replayed"] += 1
            self._send_on(entry)
            return
        for waiting in list(self.entries.values()):
            if not waiting.sent_on and not waiting.finish:
                self._send_on(waiting)

    def _try_next(self, entry: Entry) -> None:
        """If the suspect being tried has ended or passed, try the next; one that passed waits for the others."""
        quarantine = self.quarantine
        if entry.finish:
            if quarantine.forget(entry):
                self._go_on()
        elif quarantine.step(entry):
            if quarantine.suspects:  # its end comes back as "cancelled" and then the next one begins
                quarantine.pausing = True
                self.tell(self.peer("tokenizer"), Cancel(entry.id, "paused"), CONTROL)
            else:
                quarantine.forget(entry)
                self._go_on()

    def _stopped(self, entry: Entry) -> None:
        """It runs no more though nobody cancelled it: a suspect that passed, or one whose orphan grace ran out."""
        entry.sent_on = False
        if entry is self.quarantine.trying and self.quarantine.pausing:
            self.quarantine.forget(entry)
            self._go_on()
        else:
            self._send_on(entry)

    def _out_of_order(self, entry: Entry, end: int, finish: str) -> None:
        """Output that does not follow what the ledger has: old, or some before it was lost with its sender."""
        if entry.cancelled and finish:
            self._finish(entry, finish)
        elif end > len(entry.ids) or finish:
            self._ask_again(entry)

    def _rewind(self, entry: Entry, done: list[int]) -> None:
        """Send an open request's output again after the ids ``done``; its text is rebuilt by a replay."""
        if entry.accepted and not len(done) == len(entry.ids) == entry.sent:
            entry.ids = entry.ids[:len(done)] if len(done) <= len(entry.ids) else done
            entry.sent, entry.text, entry.finish, entry.syncing = len(done), "", "", False
            self._tell_accepted(entry)
            self._ask_again(entry)
        elif self._tell_accepted(entry):
            self._deliver(entry.client, [entry])

    def _ask_again(self, entry: Entry) -> None:
        """Have the output after ``ids`` sent again."""
        if not entry.syncing:
            entry.syncing = True
            self._send_on(entry)

    # ---- the ledger

    def _problem(self, request: bytes) -> limits.Problem | None:
        """Why no request, or none with this id, is taken now."""
        if self.draining:
            return "shutting_down", "the server is stopping", 5.0
        if request in self.entries:
            return "duplicate", "a request with this id is open", 0.0
        if len(self.entries) >= self.options.max_open:
            return ("overloaded", f"{len(self.entries)} requests are open; at most {self.options.max_open} are taken",
                    1.0)
        return None

    def _enter(self, entry: Entry) -> None:
        self.entries[entry.id] = entry
        self.clients.setdefault(entry.client, set()).add(entry.id)
        self.tally["accepted"] += 1
        self._send_on(entry)

    def _send_on(self, entry: Entry) -> None:
        """Send a request to the tokenizer, or keep it while suspects are tried or someone is down."""
        entry.sent_on = not self.down and (not self.quarantine.active or entry is self.quarantine.trying)
        if not entry.sent_on:
            return
        try:
            self.tell(self.peer("tokenizer"), entry.generate or entry.resume(pack(entry.ids)))
        except Overloaded as cause:
            self._refuse(entry, "overloaded", str(cause), 1.0)

    def _tell_accepted(self, entry: Entry) -> bool:
        """Whether output may go to the client: it must know first what it needs to resume."""
        if entry.accepted and not entry.told:
            entry.told = self.door.accepted(entry.client, entry.id, entry.prompt, entry.seed)
        return entry.told or not entry.accepted

    def _deliver(self, client: ClientKey, entries: list[Entry]) -> None:
        """Hand the door what the client has not had; the ledger keeps what it does not take."""
        entries = [e for e in entries if (len(e.ids) > e.sent or e.text or e.finish) and self._tell_accepted(e)]
        outputs = [Output(e.id, e.sent, e.ids[e.sent:], e.text, e.finish) for e in entries]
        if not outputs:
            return
        if not self.door.deliver(client, outputs):
            for entry in [e for e in entries if e.finish and e.cancelled]:
                self._remove(entry)  # its client cancelled and takes nothing: it has most likely left
                self.tally["cancelled"] += 1
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
        self.door.refused(entry.client, entry.id, kind, reason, retry_after)
        self._remove(entry)

    def _remove(self, entry: Entry) -> None:
        if self.entries.get(entry.id) is not entry:
            return
        del self.entries[entry.id]
        requests = self.clients[entry.client]
        requests.discard(entry.id)
        if not requests:
            del self.clients[entry.client]
        if not self.entries:
            self.emptied.set()
        self._left(entry)

    def _left(self, entry: Entry) -> None:
        """A request has gone: the quarantine must not wait for it."""
        if self.quarantine.forget(entry):
            self._go_on()


__all__ = ["Door", "Gateway", "GatewayOptions", "Output"]
