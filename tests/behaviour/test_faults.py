"""Planted faults: each changes the tokens or is caught, and without it the same run is right."""

import contextlib
from collections.abc import Callable

import pytest
from tests import faults
from tests.callers import POOL, Ask, at_once, owed
from tests.drafters import plugin
from tests.harness import DELIVERIES, graph, until

from antiphon.plugins.doors.client import Completion
from antiphon.plugins.doors.errors import AntiphonError
from antiphon.runtime.cell import Cell

# Long enough for several blocks each; alike in length, so that sequences grow and take blocks side by side.
REQUESTS = [Ask(tuple(range(n, n + 30)), 60) for n in (3, 50, 90, 140)]
BLOCKS = ("actors.allocator.options.block_size=512", "actors.allocator.options.blocks=64")


def run(*settings: str, wound: Callable[[Cell], None] = faults.untouched) -> list[Completion] | str:
    """What the requests get, or why they get nothing."""
    with graph(*settings) as llm:
        llm.graph.call(wound)
        try:
            return at_once(llm.address, REQUESTS, patience=5)
        except AntiphonError as cause:
            return f"{cause} {llm.graph.failure}"


def right(outcome: list[Completion] | str) -> bool:
    """Whether all tokens are right; there must be tokens to judge."""
    assert not isinstance(outcome, str), outcome
    return [c.ids for c in outcome] == [owed(a).ids for a in REQUESTS]


def drafting(shape: str, wrong: int) -> tuple[str, ...]:
    return (plugin("Oracle"), f"actors.drafter.options={{shape={shape!r}, wrong={wrong}, depth=4}}",
            "actors.scheduler.options.length={plugin='fixed', max=16}", "actors.scheduler.options.reserve_ahead=200")


@pytest.mark.parametrize("name", DELIVERIES)
def test_a_rollback_left_out_changes_the_tokens(name: str) -> None:
    settings = (f"delivery={name!r}", *drafting("chain", 3), *BLOCKS)
    assert right(run(*settings))
    assert not right(run(*settings, faults.backend("Unrolled")))
    # The fault lies in the rollback: where nothing is rejected it does not show.
    flawless = (f"delivery={name!r}", *drafting("chain", 0), *BLOCKS)
    assert right(run(*flawless, faults.backend("Unrolled")))


@pytest.mark.parametrize("name", DELIVERIES)
def test_a_tree_left_uncompacted_changes_the_tokens(name: str) -> None:
    settings = (f"delivery={name!r}", *drafting("tree", 3), *BLOCKS)
    assert right(run(*settings))
    assert not right(run(*settings, faults.backend("Uncompacted")))
    # Chains lie in line already.
    assert right(run(f"delivery={name!r}", *drafting("chain", 3), *BLOCKS, faults.backend("Uncompacted")))


@pytest.mark.parametrize("name", DELIVERIES)
def test_a_wrong_block_table_entry_changes_the_tokens(name: str) -> None:
    assert right(run(f"delivery={name!r}", *BLOCKS))
    assert not right(run(f"delivery={name!r}", *BLOCKS, faults.backend("Misled")))


@pytest.mark.parametrize("name", DELIVERIES)
def test_a_pending_token_that_is_not_resolved_changes_the_tokens(name: str) -> None:
    assert right(run(f"delivery={name!r}", *BLOCKS))
    assert not right(run(f"delivery={name!r}", *BLOCKS, wound=faults.drop_pending))
    # With nothing planned ahead there is nothing pending.
    assert right(run(f"delivery={name!r}", "actors.scheduler.options.ahead=0", *BLOCKS, wound=faults.drop_pending))


@pytest.mark.parametrize("name", DELIVERIES)
def test_a_block_freed_too_early_changes_the_tokens_and_is_caught(name: str) -> None:
    small = (f"delivery={name!r}", "actors.allocator.options.block_size=4", "actors.scheduler.options.reserve_ahead=0",
             *POOL)
    assert right(run(*small))
    blind = faults.FreedTooEarly(blind=True)
    assert not right(run(*small, wound=blind))
    assert "references of blocks" in blind.audit[0]
    seeing = faults.FreedTooEarly(blind=False)
    with graph(*small) as llm:
        llm.graph.call(seeing)
        with contextlib.suppress(AntiphonError):  # the allocator's failure may overtake the last tokens
            at_once(llm.address, REQUESTS, patience=5)
        until(lambda: "LedgerError" in str(llm.graph.failure), what="the allocator fails")
    assert "references of blocks" in seeing.audit[0]
