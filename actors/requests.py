"""The gateway's ledger: accepted requests, the tokens received and sent, and the suspects after a death.

It does not know doors or how clients are reached.
"""

from antiphon.actors.protocol import Generate, Resume, Sampling

ClientKey = bytes
# Steps by which the gateway may lag behind the device: two in flight, one emitted, one on its way here.
LAG = 4


class Entry:
    """One request. What it holds is enough to replay it; what was not yet sent is text and ids beyond ``sent``."""

    __slots__ = (
        "accepted", "asked", "cancelled", "client", "dead_at", "deaths", "finish", "generate", "id", "ids", "passed",
        "prompt", "sample", "sampling", "seed", "sent", "sent_on", "syncing", "tenant", "text", "told",
    )

    def __init__(self, client: ClientKey, request: bytes, tenant: str, sampling: Sampling, seed: int, sample: int):
        self.client = client
        self.id = request
        self.tenant = tenant
        self.sampling = sampling
        self.seed = seed
        self.sample = sample
        self.asked = 0  # hash of what was asked, so that a frame that came twice is known
        self.generate: Generate | None = None  # until it is accepted
        self.prompt = b""  # packed ids, known once accepted
        self.accepted = False
        self.told = False  # the client has heard that it is accepted
        self.sent_on = False  # tokenizer and scheduler have it; else it waits here
        self.syncing = False  # asked again for output after ``ids``; what comes until then is from before
        self.ids: list[int] = []  # generated
        self.sent = 0  # of them delivered to the client
        self.text = ""  # not yet delivered
        self.finish = ""
        self.cancelled = False  # the caller wants no more
        self.deaths = 0  # of the step cell while it was in flight
        self.dead_at = -1  # generated ids when the last of them found it
        self.passed = 0  # steps beyond that place since

    def resume(self, ids: bytes) -> Resume:
        """The message that replays it after the packed ``ids``."""
        return Resume(self.id, self.tenant, self.prompt, ids, self.sampling, self.seed, self.sample)


class Quarantine:
    """Finds the request that kills the step cell: those in flight at a death are replayed one at a time.

    Each runs alone until it is past the place where the death found it, by the steps that the gateway may not have
    heard of; more after each further death. One that is alone in flight at another death is poison.
    """

    def __init__(self) -> None:
        self.suspects: list[Entry] = []
        self.trying: Entry | None = None
        self.pausing = False  # the one being tried has passed and is being stopped

    @property
    def active(self) -> bool:
        """Whether other requests have to wait."""
        return bool(self.suspects) or self.trying is not None

    def death(self, in_flight: list[Entry]) -> Entry | None:
        """The step cell died. Returns the poison, if the death convicts one."""
        tried, self.trying, self.pausing = self.trying, None, False
        if tried is not None and in_flight == [tried]:
            return tried
        if tried is not None and tried not in in_flight:  # it was not running: its trial begins again
            self.suspects.insert(0, tried)
        for entry in in_flight:
            entry.deaths += 1
            entry.dead_at, entry.passed = len(entry.ids), 0
            self.suspects.append(entry)
        return None

    def next(self) -> Entry | None:
        """The suspect to try now, None if none is left."""
        self.trying, self.pausing = (self.suspects.pop(0) if self.suspects else None), False
        return self.trying

    def step(self, entry: Entry) -> bool:
        """Output of a step has come; true if it clears the suspect being tried."""
        if entry is not self.trying or self.pausing:
            return False
        entry.passed += len(entry.ids) > entry.dead_at
        return entry.passed >= LAG * entry.deaths

    def forget(self, entry: Entry) -> bool:
        """The request has gone; true if it was the one being tried."""
        if entry in self.suspects:
            self.suspects.remove(entry)
        if entry is not self.trying:
            return False
        self.trying, self.pausing = None, False
        return True
