"""The gateway's ledger: accepted requests, the tokens received and sent, and the suspects after a death.

It does not know doors or how clients are reached.
"""

from antiphon.actors.protocol import Generate, Resume, Sampling

ClientKey = bytes


class Entry:
    """One request. What it holds is enough to replay it; what was not yet sent is text and ids beyond ``sent``."""

    __slots__ = (
        "accepted", "cancelled", "client", "dead_at", "finish", "generate", "held", "id", "ids", "paused", "prompt",
        "sampling", "seed", "sent", "tenant", "text",
    )

    def __init__(self, client: ClientKey, request: bytes, tenant: str, sampling: Sampling, seed: int):
        self.client = client
        self.id = request
        self.tenant = tenant
        self.sampling = sampling
        self.seed = seed
        self.generate: Generate | None = None  # until it is accepted
        self.prompt = b""  # packed ids, known once accepted
        self.accepted = False
        self.ids: list[int] = []  # generated
        self.sent = 0  # of them delivered to the client
        self.text = ""  # not yet delivered
        self.finish = ""
        self.cancelled = False  # the caller wants no more
        self.held = False  # not sent on yet: suspects are being tried
        self.paused = False  # cleared of suspicion, waits until the others are
        self.dead_at = -1  # generated ids when a death found it; -1: no suspect

    @property
    def key(self) -> tuple[ClientKey, bytes]:
        """Request ids are bound to the client that drew them."""
        return self.client, self.id

    def resume(self, pack_ids: bytes) -> Resume:
        """The message that replays it."""
        return Resume(self.id, self.tenant, self.prompt, pack_ids, self.sampling, self.seed)


class Quarantine:
    """Finds the request that kills the step cell: those in flight at a death are replayed one at a time.

    Each runs alone until one token past the place where the death found it. One that is alone in flight at another
    death is poison.
    """

    def __init__(self) -> None:
        self.suspects: list[Entry] = []
        self.trying: Entry | None = None

    @property
    def active(self) -> bool:
        """Whether new requests have to wait."""
        return bool(self.suspects) or self.trying is not None

    def death(self, in_flight: list[Entry]) -> Entry | None:
        """The step cell died. Returns the poison, if the death convicts one."""
        poison = self.trying if self.trying is not None and in_flight == [self.trying] else None
        self.trying = None
        for entry in in_flight:
            if entry is not poison and entry not in self.suspects:
                entry.dead_at = len(entry.ids)
                self.suspects.append(entry)
        return poison

    def next(self) -> Entry | None:
        """The suspect to try now, None if none is left."""
        while self.suspects:
            entry = self.suspects.pop(0)
            if not entry.finish:
                self.trying = entry
                return entry
        return None

    def cleared(self, entry: Entry) -> bool:
        """Whether the suspect being tried has passed the place where the death found it, or has ended."""
        if entry is not self.trying or not (entry.finish or len(entry.ids) > entry.dead_at):
            return False
        self.trying = None
        entry.dead_at = -1
        return True

    def forget(self, entry: Entry) -> bool:
        """The request has gone; true if it was the one being tried."""
        if entry in self.suspects:
            self.suspects.remove(entry)
        tried = entry is self.trying
        if tried:
            self.trying = None
        return tried
