"""The ``tier`` contract: a place beside the device that holds records of bytes under keys of 32 bytes.

It does not know what a record holds, how it is checked, on which thread it runs, nor what happens when it fails.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

from antiphon.runtime.plugin import O, Options, Plugin
from antiphon.runtime.quantities import Bytes

Record = tuple[bytes, bytes]  # key, bytes


class TierError(Exception):
    """Seen by the pager, which asks nothing of the tier until it opens again: the tier does not answer as it should."""


class TierFull(TierError):
    """Seen by the pager, which writes nothing for a while: there is no room, and the tier may not make any."""


class Usage(NamedTuple):
    """What a tier holds; 0 where it cannot know. Of a store that others share, what all of them hold."""

    bytes: int = 0
    records: int = 0
    capacity: int = 0


class TierOptions(Options, frozen=True, kw_only=True):
    """What every tier's options begin with.

    ``write``: "through" as soon as a block is full, "back" when a block must leave the device or a tier above.
    ``queue``: bytes that may wait to be written; what comes when it is full is not kept.
    """

    write: Literal["back", "through"] = "through"
    queue: Bytes = 256 << 20


class Tier(Plugin[O]):
    """Contract of a ``tier``. All methods block and run on one thread of the tier's own; all may raise TierError.

    They should end or fail within a deadline of the tier's own (a socket's timeout); one that does not is given up.
    """

    kind: ClassVar[str] = "tier"

    def open(self) -> None:
        """Make ready; also after a failure. What it held before it may still hold."""
        raise NotImplementedError

    def put(self, records: Sequence[Record]) -> list[tuple[bytes, bytes | None]]:
        """Keep records, each whole or not at all. Returns what had to make room, with its bytes if they are at hand."""
        raise NotImplementedError

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Records in the order of the keys; None where there is none."""
        raise NotImplementedError

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether there is a record, in the order of the keys."""
        raise NotImplementedError

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget records; a key that is not there is no error."""
        raise NotImplementedError

    def usage(self) -> Usage:
        """What is held."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of files and connections; what survives a restart stays."""
