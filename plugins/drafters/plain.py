"""The plain drafter drafts nothing: decoding goes token by token.

It does not know sequences.
"""

from antiphon.actors.drafter import EMPTY, Drafter, Proposal, Sequence
from antiphon.runtime.plugin import Options


class Plain(Drafter[Options]):
    """No speculation; the stand-in for any drafter that fails."""

    most = 0
    lag = 1

    def propose(self, sequence: Sequence, k: int) -> Proposal:
        """Nothing."""
        return EMPTY
