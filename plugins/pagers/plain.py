"""The plain pager keeps every block on the device.

It does not know other places.
"""

from antiphon.actors.pager import Pager
from antiphon.runtime.plugin import Options


class Plain(Pager[Options]):
    """No offload."""

    def page(self, step: int, moves: bytes) -> int:
        """Nothing can move: whoever asks made a mistake."""
        raise ValueError("the plain pager moves no blocks")
