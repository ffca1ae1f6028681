"""What one tenant has computed is no other tenant's: not on the device, not in a tier, not after a restart."""

from pathlib import Path

import pytest
from tests.callers import assert_owed, at_once
from tests.harness import Server
from tests.sessions import after, kept, kill_all, opening, stats, whole, written

DOORS = """\
schema = 1
extends = "standard"
[actors.gateway]
options = {{ tenant = "ada" }}
[actors.beside]
kind = "gateway"
plugin = "zmq"
options = {{ listen = "ipc://{home}/beside", tenant = "bob" }}
uses = ["tokenizer"]
cell = "front"
"""


def hits(server: Server) -> tuple[int, int]:
    """Slots found on the device and in tiers so far."""
    found = whole(server)
    return found["hit_slots"], found["tier_slots"]


@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_tenants_share_nothing_but_a_tenant_finds_its_own_again(tmp_path: Path, cache: str) -> None:
    config = tmp_path / "two-doors.toml"
    config.write_text(DOORS.format(home=tmp_path))
    settings = kept(tmp_path, f"{{plugin='disk', path={str(tmp_path / 'kv')!r}, size='64MiB'}}", cache=cache)
    ada, bob = f"ipc://{tmp_path}/door", f"ipc://{tmp_path}/beside"
    turns = opening(1, seed=1)  # alone: nothing to share but with itself
    second = after(turns)
    with Server(tmp_path, *settings, config=str(config)) as server:
        assert_owed(turns, at_once(ada, turns))
        assert hits(server) == (0, 0)
        assert_owed(turns, at_once(bob, turns))
        assert hits(server) == (0, 0)
        assert_owed(second, at_once(ada, second))
        shared = hits(server)
        assert shared[0] > len(turns[0].prompt) - 8
        written(server)
        kill_all(server)
    with Server(tmp_path, *settings, config=str(config)) as server:
        third = after(second)
        assert_owed(third, at_once(bob, third))  # of its own it has the first turn: what ada added it must not find
        first = len(turns[0].prompt) // 8 * 8
        assert hits(server)[1] <= first + 12
        assert_owed(third, at_once(ada, third))
        device, tiers = hits(server)
        assert tiers >= first + len(second[0].prompt) // 8 * 8
        assert device == 0
        assert stats(server)["beside"]["finished"] == 1

