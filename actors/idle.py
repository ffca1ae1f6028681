"""The blocks of one table that nobody holds, in the order in which they give way.

It does not know what a block is worth, nor what is in it.
"""

import heapq
import itertools
from collections.abc import Callable
from typing import TypeAlias

Item: TypeAlias = tuple[float, int, int]  # worth, number of the letting go, block


class Idle:
    """A heap of those that may go; what has become untrue in it is passed over when it comes to the top."""

    def __init__(self) -> None:
        self.items: dict[int, Item] = {}  # of every idle block
        self.heap: list[Item] = []
        self.numbers = itertools.count()

    def add(self, block: int, worth: float, may_go: bool) -> None:
        """Nobody holds the block any more."""
        self.items[block] = (worth, next(self.numbers), block)
        if may_go:
            self.ready(block)

    def ready(self, block: int) -> None:
        """An idle block may go from now on, with the worth and in the place that it had when it was let go."""
        heapq.heappush(self.heap, self.items[block])
        if len(self.heap) > 64 + 2 * len(self.items):  # what is passed over must not fill the memory
            self.heap = [item for item in self.heap if self.items.get(item[2]) is item]
            heapq.heapify(self.heap)

    def discard(self, block: int) -> None:
        """The block is idle no more, or never was."""
        self.items.pop(block, None)

    def pick(self, may_go: Callable[[int], bool]) -> tuple[int, float] | None:
        """Take out the block that is worth least of those that may go, with its worth; of equals the longest idle.

        One that may not go has to be told ``ready`` when it may again. None: there is none.
        """
        while self.heap:
            item = heapq.heappop(self.heap)
            worth, _, block = item
            if self.items.get(block) is item and may_go(block):
                del self.items[block]
                return block, worth
        return None
