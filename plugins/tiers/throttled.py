"""The ``throttled`` tier makes another tier as slow and as faulty as an experiment wants it.

It does not know which tier it wraps. It is for tests and benches.
"""

import random
import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from antiphon.actors.tier import Record, Tier, TierError, TierOptions, Usage
from antiphon.runtime.plugin import Site
from antiphon.runtime.quantities import Seconds, size

Rate = Annotated[float, msgspec.Meta(ge=0, le=1)]


class ThrottledOptions(TierOptions, frozen=True, kw_only=True):
    """``tier`` = { plugin = NAME, ... } is wrapped; its own ``write`` and ``queue`` are those given here.

    ``bandwidth`` (bytes a second as "10MB/s", or "" for no limit) and ``latency`` hold for each call. ``fail`` is the
    share of calls that raise, ``corrupt`` that of records read with a flipped bit, drawn from ``seed``.
    """

    tier: dict[str, Any]
    bandwidth: str = ""
    latency: Seconds = 0.0
    fail: Rate = 0.0
    corrupt: Rate = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.rate()
        if double := sorted({"write", "queue"} & self.tier.keys()):
            raise ValueError(f"{' and '.join(double)} of a wrapped tier is not read: write it beside 'tier'")

    def rate(self) -> float:
        """Bytes per second; infinite without a limit. Raises ValueError."""
        if not self.bandwidth:
            return float("inf")
        amount, slash, unit = self.bandwidth.partition("/")
        if slash and unit.strip() != "s":
            raise ValueError(f'bandwidth {self.bandwidth!r}: write a size a second such as "10MB/s"')
        if not (found := size(amount)):
            raise ValueError("bandwidth is 0, so nothing would ever come")
        return float(found)


class Throttled(Tier[ThrottledOptions]):
    """A tier behind a slow and unreliable line."""

    def __init__(self, options: ThrottledOptions, site: Site):
        super().__init__(options, site)
        self.inner: Tier[Any] = site.build("tier", options.tier)
        self._rate = options.rate()
        self._random = random.Random(options.seed)  # noqa: S311 - faults that a seed repeats

    def open(self) -> None:
        """Open what is wrapped."""
        self.inner.open()

    def put(self, records: Sequence[Record]) -> list[tuple[bytes, bytes | None]]:
        """Slowly."""
        self._wait(sum(len(record) for _, record in records))
        return self.inner.put(records)

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Slowly, some with a flipped bit."""
        found = self.inner.get(keys)
        self._wait(sum(len(record) for record in found if record is not None))
        return [self._damaged(r) if r and self._random.random() < self.options.corrupt else r for r in found]

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """After the latency."""
        self._wait(0)
        return self.inner.has(keys)

    def drop(self, keys: Sequence[bytes]) -> None:
        """At once."""
        self.inner.drop(keys)

    def usage(self) -> Usage:
        """Of what is wrapped."""
        return self.inner.usage()

    def close(self) -> None:
        """Close what is wrapped."""
        self.inner.close()

    def _wait(self, amount: int) -> None:
        if self._random.random() < self.options.fail:
            raise TierError("a fault was drawn")
        time.sleep(self.options.latency + amount / self._rate)

    def _damaged(self, record: bytes) -> bytes:
        bit = self._random.randrange(8 * len(record))
        damaged = bytearray(record)
        damaged[bit // 8] ^= 1 << bit % 8
        return bytes(damaged)

