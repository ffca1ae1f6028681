"""The pager knows where blocks live and moves them between places.

It does not know why a block is wanted, nor what its slots hold.
"""

from typing import Any, ClassVar

from antiphon.actors.protocol import Inspect, Page, Paged, Prepare, Prepared, Report
from antiphon.runtime.actor import Actor, ActorSite
from antiphon.runtime.plugin import O, Options, Plugin


class Pager(Plugin[O]):
    """Contract of a ``pager``: starts moves and names the ticket the executor waits for."""

    kind: ClassVar[str] = "pager"

    def page(self, step: int, moves: bytes) -> int:
        """Start moves (triples table, from block, to block); the ticket, 0 when nothing has to be awaited."""
        raise NotImplementedError


class PagerOptions(Options, frozen=True):
    """The pager actor has no options of its own."""


class PagerActor(Actor[PagerOptions]):
    """Hosts a pager."""

    kind = "pager"
    plugs = ("pager",)
    stand_in = "plain"

    def __init__(self, options: PagerOptions, site: ActorSite):
        super().__init__(options, site)
        self.pager: Pager[Any] = site.plugin("pager")

    def on_prepare(self, message: Prepare) -> Prepared:
        """The pager needs nothing from the step."""
        return Prepared()

    def on_page(self, message: Page) -> Paged:
        """Start moves."""
        return Paged(self.pager.page(message.step, message.moves))

    def on_inspect(self, message: Inspect) -> Report:
        """Facts for an operator."""
        return Report(self.facts())
