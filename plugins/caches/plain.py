"""The plain cache keeps nothing: every sequence is computed from its first token.

It does not know blocks.
"""

from typing import ClassVar

from antiphon.actors.cache import Cache
from antiphon.runtime.plugin import Options


class Plain(Cache[Options]):
    """No prefix cache."""

    keeps: ClassVar[bool] = False
