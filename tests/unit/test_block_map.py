"""The block map: what each block is to whom, and its picture."""

import sys
from pathlib import Path

import numpy as np
import pytest

from antiphon.actors.ledger import Hold, Ledger
from antiphon.plugins.bench import blockmap
from antiphon.plugins.bench.figures import BenchError
from antiphon.plugins.bench.memory import (
    ACTIVE,
    CACHED,
    FREE,
    MOVING,
    OTHER,
    QUARANTINED,
    BlockMap,
    requests,
    states_of,
)


class All:
    """Keeps every block."""

    def idle(self, table: int, block: int) -> bool:
        return True

    def busy(self, table: int, block: int) -> None: ...

    def victim(self, table: int) -> int:
        raise NotImplementedError


def test_every_state_of_a_block_is_told_apart() -> None:
    ledger = Ledger((8,), All())
    for key, owner, reason in [(1, "a", "sequence"), (2, "b", "sequence"), (-1, "t", "transfer"),
                               (-2, "q", "quarantine"), (-3, "p", "pin"), (3, "c", "sequence")]:
        ledger.open(key, Hold(owner, reason, 1))
        ledger.take(key, 1)
    ledger.share(-1, 0, 0)  # of request a, and on its way to a tier
    ledger.close(3)
    colours: dict[str, int] = {}
    assert states_of(ledger, colours).tolist() == [
        ACTIVE, ACTIVE + 1, MOVING, QUARANTINED, OTHER, CACHED, FREE, FREE]
    ledger.close(1)
    assert states_of(ledger, colours).tolist()[:2] == [MOVING, ACTIVE + 1]


@pytest.mark.parametrize(("name", "begins"), [("map.png", b"\x89PNG"), ("map.svg", b"<?xml")])
def test_the_picture_is_what_its_name_says(tmp_path: Path, name: str, begins: bytes) -> None:
    states = np.array([[FREE, ACTIVE, ACTIVE + 30], [CACHED, MOVING, QUARANTINED]], np.int32)
    blockmap.ready(tmp_path / name)
    blockmap.draw(BlockMap(16, states), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_what_cannot_be_drawn_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(BenchError, match=r"ends in \.png or \.svg"):
        blockmap.ready(tmp_path / "map.gif")
    with pytest.raises(BenchError, match="there is no directory"):
        blockmap.ready(tmp_path / "no" / "map.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BenchError, match=r"pip install 'antiphon\[plot\]'") as caught:
        blockmap.ready(tmp_path / "map.png")
    assert caught.value.code == 2


def test_the_workload_of_a_seed_is_the_same_and_mixed() -> None:
    assert requests(9, 3) == requests(9, 3) != requests(9, 4)
    lengths = [len(ids) for ids, _ in requests(200, 1)]
    assert min(lengths) < 100
    assert max(lengths) > 1500
