"""A fixed number of drafts for every sequence in every step.

It does not know what drafting or verifying costs.
"""

from antiphon.actors.scheduler import Length
from antiphon.actors.sequences import Sequence
from antiphon.runtime.plugin import Options


class FixedOptions(Options, frozen=True):
    """``max`` drafts are verified per sequence and step."""

    max: int = 4


class Fixed(Length[FixedOptions]):
    """Always the same."""

    def budgets(self, sequences: list[Sequence], most: int) -> list[int]:
        """The option, or what the drafter can give."""
        return [min(self.options.max, most)] * len(sequences)
