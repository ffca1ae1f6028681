"""The fair policy: priorities first, then tenants by what they were served, then first come, first served."""

from typing import Any

from antiphon.actors.columns import pack
from antiphon.actors.protocol import Admit, Sampling
from antiphon.actors.sequences import Sequence
from antiphon.plugins.policies.fair import Fair
from antiphon.runtime.plugin import Options


def waiting(*asked: tuple[str, int]) -> list[Sequence]:
    return [Sequence(Admit(bytes([i]) * 16, tenant, pack([1, 2]), 2, Sampling(5, priority=priority), 0), [1, 2], "t",
                     frozenset()) for i, (tenant, priority) in enumerate(asked)]


def order(policy: Fair, sequences: list[Sequence]) -> list[int]:
    return [s.request[0] for s in policy.order(sequences)]


def fair() -> Fair:
    site: Any = None
    return Fair(Options(), site)


def test_higher_priorities_go_first_and_within_them_tenants_take_turns() -> None:
    asked = waiting(("a", 0), ("a", 0), ("b", 0), ("b", 5), ("a", 5), ("a", -1))
    assert order(fair(), asked) == [3, 4, 0, 2, 1, 5]


def test_a_tenant_that_was_served_more_waits() -> None:
    policy = fair()
    asked = waiting(("a", 0), ("b", 0))
    policy.order(asked)
    policy.served({"a": 100})
    assert order(policy, asked) == [1, 0]


def test_the_newest_of_the_lowest_priority_gives_way() -> None:
    assert fair().victim(waiting(("a", 0), ("a", -2), ("a", -2), ("a", 3))).request[0] == 2
