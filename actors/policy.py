"""The contracts of what the scheduler leaves to plugins: who is served, and how much is drafted.

It does not know steps.
"""

from typing import ClassVar

from antiphon.actors.sequences import Sequence
from antiphon.runtime.plugin import O, Plugin


class Policy(Plugin[O]):
    """Contract of a ``policy``: who is served next, and who gives way."""

    kind: ClassVar[str] = "policy"

    def order(self, waiting: list[Sequence]) -> list[Sequence]:
        """Waiting sequences in the order in which they should begin."""
        raise NotImplementedError

    def victim(self, running: list[Sequence]) -> Sequence:
        """The running sequence to preempt when memory is short."""
        raise NotImplementedError

    def served(self, rows: dict[str, int]) -> None:
        """A step is launched with these rows, by tenant."""


class Length(Plugin[O]):
    """Contract of a ``length``: how many drafts each sequence gets verified in a step."""

    kind: ClassVar[str] = "length"

    def budgets(self, sequences: list[Sequence], most: int) -> list[int]:
        """Most drafts per sequence, each at most ``most``; zero included."""
        raise NotImplementedError
