"""A request that kills its process is found among innocent ones and refused; the others finish."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests import faults
from tests.callers import POOL, Ask, answered, asks, owed
from tests.harness import Server

from antiphon.plugins.doors.client import AsyncClient, Completion
from antiphon.plugins.doors.errors import Refused

SLOW = ("actors.executor.options.step_seconds=0.002", "supervision.backoff='10ms'", *POOL)


def kills(ask: Ask) -> int:
    """Position of the token that kills the backend ``Poisoned``, -1 if none is ever computed."""
    ids = [*ask.prompt, *owed(ask).ids[:-1]]  # the last token is never put in
    return next((i for i, token in enumerate(ids) if token == 511 and i % 2 == 0), -1)


HARMLESS = [a for a in asks(60, 41, most=50) if kills(a) < 0]


def poisoned(generated: int, count: int) -> list[Ask]:
    """Requests that kill at a token they generate, at least ``generated`` after the prompt."""
    found = [a for a in (Ask((n, n + 1, n + 2), 60) for n in range(500)) if kills(a) >= len(a.prompt) + generated]
    return found[:count]


async def together(address: str, requests: Sequence[Ask]) -> list[Completion | BaseException]:
    async with AsyncClient(address, timeout=60) as client:
        return await asyncio.gather(*(client.generate(a.prompt, **a.options()) for a in requests),
                                    return_exceptions=True)


def assert_found(requests: Sequence[Ask], outcome: Sequence[Completion | BaseException]) -> None:
    """The poison is refused, everybody else has what is owed."""
    for ask, got in zip(requests, outcome, strict=True):
        if kills(ask) >= 0:
            assert isinstance(got, Refused), got
            assert got.kind == "poison"
        else:
            assert isinstance(got, Completion), got
            assert answered(got) == owed(ask)


@pytest.mark.feature("crash-replay", "sampling", "one-ahead", "direct-delivery")
@pytest.mark.parametrize(("place", "name"), [("first", "zmq"), ("last", "direct")])
def test_a_poisonous_prompt_among_fifteen_others(tmp_path: Path, place: str, name: str) -> None:
    requests = HARMLESS[:15]
    requests.insert({"first": 0, "last": 15}[place], Ask((4, 5, 511, 7), 30))
    with Server(tmp_path, faults.backend("Poisoned"), f"delivery={name!r}", *SLOW) as server:
        assert_found(requests, asyncio.run(together(server.address, requests)))
        assert server.text().count('"cell died"') == 2
        assert_found(HARMLESS[15:17], asyncio.run(together(server.address, HARMLESS[15:17])))
        with server.client() as client:
            found = client.stats()["gateway"]
        assert (found["poison"], found["open"], found["suspects"]) == (1, 0, 0)
        assert server.stop() == 0


def test_poison_that_acts_late_is_found_though_the_gateway_lags_behind(tmp_path: Path) -> None:
    """The token that kills is computed while the gateway has not yet heard of those before it."""
    requests = [*HARMLESS[:9], *poisoned(12, 1), *HARMLESS[9:12]]
    assert len(requests) == 13
    with Server(tmp_path, faults.backend("Poisoned"), *SLOW) as server:
        assert_found(requests, asyncio.run(together(server.address, requests)))
        assert server.text().count('"cell died"') == 2
        assert server.stop() == 0


def test_two_poisons_are_both_found_within_the_usual_limit_of_restarts(tmp_path: Path) -> None:
    requests = [*HARMLESS[:4], *poisoned(3, 1), *HARMLESS[4:6], Ask((511,), 9), *HARMLESS[6:9]]
    with Server(tmp_path, faults.backend("Poisoned"), *SLOW) as server:
        assert_found(requests, asyncio.run(together(server.address, requests)))
        assert server.text().count('"cell died"') == 3
        assert server.stop() == 0
