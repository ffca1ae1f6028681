"""The executor's mirrors of the block tables: changes, forks, growth, and windows wider than their pools."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog

from antiphon.actors.columns import pack, sequence
from antiphon.actors.executor import Executor, ExecutorOptions
from antiphon.actors.model import ModelSection
from antiphon.actors.protocol import Close, Configured, Execute, Executed, Fork, Load, Open, Sampling
from antiphon.plugins.backends.alone import Bare, pools
from antiphon.plugins.backends.null import Null, NullOptions, expected

SIZE = 4
OPTIONS = NullOptions(window=6, context=400)


class Bench:
    """An executor on the null backend, without a cell around it."""

    def __init__(self, options: NullOptions = OPTIONS) -> None:
        self.backend = Null(options, Bare(ModelSection()))
        site: Any = SimpleNamespace(
            log=structlog.get_logger(), services={}, plugin=lambda kind: self.backend,
            post=SimpleNamespace(cell="step", epoch=1, direct=False),
        )
        self.executor = Executor(ExecutorOptions(), site)
        self.services = site.services

    async def load(self, layout: Configured) -> None:
        await self.executor.on_load(Load(layout))

    def open(self, number: int) -> None:
        self.executor.on_open(Open(number, bytes(16), "local", 0, pack([1]), 1, Sampling(), 0))

    async def execute(self, number: int, start: int, ids: list[int], changes: list[tuple[int, int, int]]) -> Any:
        """Logits of the last row; ``changes`` are (table, entry, block)."""
        n = len(ids)
        told = self.executor.on_execute(Execute(
            0, pack([number]), pack([start]), pack([0, n]), pack(ids), pack(range(start, start + n)), b"",
            pack([n - 1]), pack([x for change in changes for x in (number, *change)]), finish=True,
        ))
        assert not isinstance(told, Executed)
        done = await told
        assert done.logits is not None
        value = await self.executor.device.submit(lambda: self.executor.device.value(done.logits), "look")
        return value[0]


@pytest.fixture
async def bench() -> Any:
    made = Bench()
    await made.load(pools(made.backend.facts(), 12, SIZE))
    yield made
    made.executor.device.close()


def both(*entries: tuple[int, int]) -> list[tuple[int, int, int]]:
    return [(table, entry, block) for entry, block in entries for table in (0, 1)]


async def test_the_service_knows_the_pools_once_they_are_loaded(bench: Bench) -> None:
    assert bench.services["blocks"] is bench.executor.blocks
    assert bench.executor.blocks.pools is bench.executor.pools is not None


async def test_of_two_changes_to_an_entry_the_later_counts(bench: Bench) -> None:
    bench.open(3)
    found = await bench.execute(3, 0, [5, 6, 7, 8, 9], [*both((0, 1), (1, 2)), (0, 1, 7), (1, 1, 8)])
    assert (found == expected(np.array([5, 6, 7, 8, 9]), OPTIONS)).all()
    assert [table[3, :3].tolist() for table in bench.executor.tables] == [[1, 7, -1], [1, 8, -1]]


async def test_a_fork_reads_the_slots_that_it_shares(bench: Bench) -> None:
    bench.open(0)
    ids = list(range(10))
    await bench.execute(0, 0, ids, both((0, 0), (1, 1), (2, 2)))
    bench.executor.on_fork(Fork(sequence(70, 1), 0, 1, 6))  # beyond the rows that the mirrors began with
    assert [table[70, :3].tolist() for table in bench.executor.tables] == [[0, 1, -1]] * 2
    bench.executor.on_fork(Fork(2, 0, 2))
    assert [table[2, :4].tolist() for table in bench.executor.tables] == [[0, 1, 2, -1]] * 2
    # The whole fork goes on in a block of its own for what would be written.
    bench.backend.copy(0, np.array([2], np.int32), np.array([5], np.int32))
    bench.backend.copy(1, np.array([2], np.int32), np.array([6], np.int32))
    found = await bench.execute(2, 10, [77], [(0, 2, 5), (1, 2, 6)])
    assert (found == expected(np.array([*ids, 77]), OPTIONS)).all()
    again = await bench.execute(0, 10, [78], [])
    assert (again == expected(np.array([*ids, 78]), OPTIONS)).all()
    bench.executor.on_close(Close(pack([0, 2]), "finished"))
    assert all((table[[0, 2]] == -1).all() for table in bench.executor.tables)


@pytest.mark.parametrize("marked", [False, True])
async def test_a_window_moves_over_more_entries_than_its_pool_has_blocks(marked: bool) -> None:
    """Blocks that left the window are given to later entries; entries before it are stale, or marked -1."""
    bench = Bench()
    layout = pools(bench.backend.facts(), 100, SIZE)
    await bench.load(Configured(SIZE, (100, 3), layout.groups))
    bench.open(0)
    ids = [int(x) for x in np.random.default_rng(0).integers(0, 500, 120)]
    for at in range(0, 120, SIZE):
        entry = at // SIZE
        changes = [(0, entry, entry), (1, entry, entry % 3)]
        if marked and entry >= 3:
            changes.append((1, entry - 3, -1))
        found = await bench.execute(0, at, ids[at : at + SIZE], changes)
        assert (found == expected(np.array(ids[: at + SIZE]), OPTIONS)).all()
    bench.executor.device.close()


async def test_a_sequence_may_be_longer_than_two_to_the_sixteen() -> None:
    options = NullOptions(window=100, context=1 << 17)
    bench = Bench(options)
    await bench.load(pools(bench.backend.facts(), 5000, 16))
    bench.open(0)
    ids = [int(x) for x in np.random.default_rng(0).integers(0, 500, 70_000)]
    order = np.random.default_rng(1).permutation(5000)
    for at in range(0, 70_000, 4096):
        chunk = ids[at : at + 4096]
        entries = range(-(-at // 16), -(-(at + len(chunk)) // 16))
        changes = [(table, entry, int(order[entry])) for entry in entries for table in (0, 1)]
        found = await bench.execute(0, at, chunk, changes)
    assert (found == expected(np.array(ids), options)).all()
    bench.executor.device.close()
