"""The plain cache keeps nothing: every sequence is computed from its first token.

It does not know blocks.
"""

from collections.abc import Sequence

from antiphon.actors.allocator import Cache
from antiphon.runtime.plugin import Options


class Plain(Cache[Options]):
    """No prefix cache."""

    def match(self, tenant: str, ids: Sequence[int]) -> list[list[int]]:
        """Nothing is cached."""
        return []
