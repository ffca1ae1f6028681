"""The plain pager keeps every block on the device.

It does not know other places.
"""

from antiphon.actors.pager import Pager
from antiphon.runtime.plugin import Options


class Plain(Pager[Options]):
    """No tiers: only copies on the device."""
