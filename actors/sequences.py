"""Sequences as the scheduler keeps them: ids, progress, and what is in flight.

It does not know how steps are composed from them.
"""

import itertools

from antiphon.actors.columns import INDEX_BITS, pack, sequence
from antiphon.actors.protocol import Admit, Open, Sampling

_arrivals = itertools.count()


class Sequence:
    """One sample of one request. Without steps in flight ``planned`` equals ``computed``."""

    __slots__ = (
        "arrival", "cancelled", "computed", "end", "flight", "granted", "handle", "have", "held", "ids", "like",
        "orphaned", "pending", "planned", "prompt_length", "request", "sample", "sampling", "seed", "stops",
        "tenant", "tokenizer", "total", "unknown",
    )

    def __init__(self, admit: Admit, ids: list[int], tokenizer: str, stops: frozenset[int]):
        self.request = admit.request
        self.tenant = admit.tenant
        self.like = admit.like  # request with the same prompt, whose KV it may share
        self.sample = admit.sample
        self.tokenizer = tokenizer  # instance that hears of new ids
        self.ids = ids  # prompt and generated, as far as known on the host
        self.prompt_length = admit.prompt_length
        self.sampling: Sampling = admit.sampling
        self.seed = admit.seed
        self.stops = stops
        self.handle = -1  # -1: waiting
        self.computed = 0  # KV slots that are valid and committed
        self.planned = 0  # KV slots after the steps in flight
        self.granted = 0  # KV slots that may be used
        self.have = 0  # ids that the drafter's mirror has
        self.flight = 0  # steps in flight
        self.unknown = 0  # tokens chosen on the device and not yet known on the host
        self.total = len(ids)  # tokens that exist, the unknown ones included
        self.end = self.prompt_length + self.sampling.max_tokens  # tokens of the whole request, if nothing stops it
        self.pending: tuple[int, int] | None = None  # (step, logit row) of the last unknown token
        self.held = False  # running, but its beginning is computed by another sequence or on its way from a tier
        self.cancelled = ""  # reason
        self.orphaned = 0.0  # monotonic second at which its tokenizer was lost; 0: it was not
        self.arrival = next(_arrivals)

    @property
    def generated(self) -> int:
        """Ids known beyond the prompt."""
        return len(self.ids) - self.prompt_length

    @property
    def left(self) -> int:
        """Tokens that may still be generated once the unknown ones are known."""
        return self.end - self.total

    @property
    def uncomputed(self) -> int:
        """Tokens whose KV no planned step writes yet; 1 while decoding."""
        return self.total - self.planned

    def opening(self, source: "Sequence | None" = None) -> Open:
        """The message that introduces the sequence as it is now; it may share the prompt's KV with ``source``."""
        shared = min(source.computed, self.prompt_length, len(self.ids) - 1) if source is not None else 0
        return Open(self.handle, self.request, self.tenant, self.sample, pack(self.ids), self.prompt_length,
                    self.sampling, self.seed, source.handle if source is not None and shared else -1, shared)

    def resembles(self, other: "Sequence") -> bool:
        """Whether it is another sample of the other's prompt."""
        length = self.prompt_length
        return (self.tenant == other.tenant and length == other.prompt_length
                and self.ids[:length] == other.ids[:length])

    def append(self, ids: list[int]) -> tuple[list[int], str]:
        """Take verified ids up to the first stop or the limit; what was taken, and the finish ("" goes on)."""
        finish = ""
        for count, token in enumerate(ids, start=1):
            self.ids.append(token)
            if token in self.stops:
                finish = "stop"
            elif len(self.ids) >= self.end:
                finish = "length"
            if finish:
                ids = ids[:count]
                break
        self.total = len(self.ids) + self.unknown
        return ids, finish

    def finish(self) -> str:
        """Finish that the ids so far already mean: a resumed request may be complete."""
        if self.generated and self.ids[-1] in self.stops:
            return "stop"
        return "length" if len(self.ids) >= self.end else ""

    def continues(self, admit: Admit, ids: list[int]) -> bool:
        """Whether a request that comes anew is this one as it was after ``ids``, and this one is not about to end."""
        return (not self.cancelled and self.prompt_length == admit.prompt_length and self.ids[:len(ids)] == ids
                and (self.sampling, self.seed, self.sample) == (admit.sampling, admit.seed, admit.sample))

    def rewind(self) -> None:
        """Forget all computed KV: preempted."""
        self.held = False
        self.handle, self.computed, self.planned, self.granted, self.have = -1, 0, 0, 0, 0


class Handles:
    """Gives out dense indexes, each time with a new generation."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._generations: list[int] = []

    def take(self) -> int:
        """A handle no one has used."""
        if not self._free:
            if len(self._generations) >> INDEX_BITS:
                raise OverflowError(f"more than {1 << INDEX_BITS} sequences at once")
            self._free.append(len(self._generations))
            self._generations.append(0)
        index = self._free.pop()
        self._generations[index] += 1
        return sequence(index, self._generations[index])

    def give(self, handle: int) -> None:
        """The handle's sequence is closed."""
        self._free.append(handle & ((1 << INDEX_BITS) - 1))
