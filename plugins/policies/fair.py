"""Fair order: higher priorities first, among equals the tenant that was served least, then first come, first served.

It does not know memory.
"""

from antiphon.actors.scheduler import Policy
from antiphon.actors.sequences import Sequence
from antiphon.runtime.plugin import Options, Site


class Fair(Policy[Options]):
    """Counts the rows each tenant was served, as start-time fair queueing does with virtual time.

    A tenant that comes back from idling starts at the least count among those waiting, so it cannot save up.
    """

    def __init__(self, options: Options, site: Site):
        super().__init__(options, site)
        self._served: dict[str, int] = {}
        self._present: set[str] = set()

    def order(self, waiting: list[Sequence]) -> list[Sequence]:
        """Higher priorities first, each of them in fair order."""
        priorities = {s.sampling.priority for s in waiting}
        if len(priorities) == 1:
            return self._fair(waiting)
        return [s for p in sorted(priorities, reverse=True)
                for s in self._fair([w for w in waiting if w.sampling.priority == p])]

    def _fair(self, waiting: list[Sequence]) -> list[Sequence]:
        """Least served tenant first; a tenant's next request counts as served once its predecessors are placed."""
        tenants = {s.tenant for s in waiting}
        if len(tenants) == 1:
            self._present = tenants
            return sorted(waiting, key=lambda s: s.arrival)
        floor = min((self._served.get(t, 0) for t in tenants & self._present), default=0)
        for tenant in tenants - self._present:
            self._served[tenant] = max(self._served.get(tenant, 0), floor)
        self._present = tenants
        account = {t: self._served.get(t, 0) for t in tenants}
        queues = {t: sorted((s for s in waiting if s.tenant == t), key=lambda s: -s.arrival) for t in tenants}
        ordered = []
        while queues:
            tenant = min(queues, key=lambda t: (account[t], queues[t][-1].arrival))
            sequence = queues[tenant].pop()
            account[tenant] += sequence.total
            ordered.append(sequence)
            if not queues[tenant]:
                del queues[tenant]
        return ordered

    def victim(self, running: list[Sequence]) -> Sequence:
        """The newest of the lowest priority gives way: it has the least to compute again."""
        return max(running, key=lambda s: (-s.sampling.priority, s.arrival))

    def served(self, rows: dict[str, int]) -> None:
        """Count."""
        for tenant, count in rows.items():
            self._served[tenant] = self._served.get(tenant, 0) + count
