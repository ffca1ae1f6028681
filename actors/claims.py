"""Claims: which sequence is filling the block of a key, and who waits for it.

It does not know blocks. Who holds a claim never waits for another sequence, so nobody waits in a circle.
"""

from collections.abc import Iterable, Sequence


class Claims:
    """A key is claimed by one sequence at a time; when it is settled, in whatever way, its waiters are named once."""

    def __init__(self) -> None:
        self._author: dict[bytes, int] = {}
        self._claimed: dict[int, set[bytes]] = {}  # the same by author
        self._waiters: dict[bytes, list[int]] = {}

    def take(self, sequence: int, keys: Iterable[bytes]) -> None:
        """Claim those keys that nobody has claimed."""
        mine = self._claimed.setdefault(sequence, set())
        for key in keys:
            if self._author.setdefault(key, sequence) == sequence:
                mine.add(key)

    def author(self, key: bytes) -> int | None:
        """Who fills the block of this key."""
        return self._author.get(key)

    def wait(self, sequence: int, keys: Sequence[bytes]) -> None:
        """Wait for the last of ``keys`` that the first one's author fills in a row."""
        author, last = self._author[keys[0]], keys[0]
        for key in keys:
            if self._author.get(key) != author:
                break
            last = key
        self._waiters.setdefault(last, []).append(sequence)

    def settle(self, key: bytes) -> list[int]:
        """The key's block is full, or another one was found: who waited."""
        author = self._author.pop(key, None)
        if author is None:
            return []
        self._claimed[author].discard(key)
        return self._waiters.pop(key, [])

    def drop(self, sequence: int) -> list[int]:
        """The sequence fills nothing more: who waited for it."""
        waiters: list[int] = []
        for key in self._claimed.pop(sequence, ()):
            del self._author[key]
            waiters += self._waiters.pop(key, ())
        return waiters

    def __len__(self) -> int:
        return len(self._author)
