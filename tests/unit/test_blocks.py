"""The service "blocks": whole blocks are read, written and copied in the order of the device's stages."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from antiphon.actors.blocks import BlockAccess
from antiphon.actors.device import Device
from antiphon.actors.executor import Batch
from antiphon.actors.model import ModelSection
from antiphon.plugins.backends.alone import Bare, pools
from antiphon.plugins.backends.null import Null, NullOptions, expected, mix

SIZE = 4
OPTIONS = NullOptions(window=6)
IDS = list(range(40, 53))  # 13 slots: three full blocks and one slot
BLOCKS = [5, 2, 7, 0]


class Bench:
    """A null backend on a device thread with one sequence in it."""

    def __init__(self) -> None:
        self.backend = Null(OPTIONS, Bare(ModelSection()))
        self.device = Device("cell", 1)
        self.access = BlockAccess(self.device, self.backend)
        self.layout = pools(self.backend.facts(), 10, SIZE)

    def load(self) -> None:
        self.backend.load(self.layout)
        self.access.pools = self.layout
        self.run(IDS, 0, [BLOCKS, BLOCKS])

    def run(self, ids: list[int], start: int, tables: list[list[int]]) -> Any:
        """Logits of the last row."""
        n = len(ids)
        columns = [np.array(t, np.int32)[None] for t in tables]
        return self.backend.execute(Batch(
            np.zeros(1, np.int32), np.array([start], np.int32), np.array([0, n], np.int32), np.array(ids, np.int32),
            np.arange(start, start + n, dtype=np.int32), None, tuple(columns), np.array([n - 1], np.int32),
        )).logits[0]


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    made.load()
    yield made
    made.device.close()


def blocks(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


async def test_a_record_is_keys_then_values_of_the_block_s_slots(bench: Bench) -> None:
    [[context, draft], [window]] = await bench.access.read([(0, blocks(2, 5)), (1, blocks(2))])
    assert context.shape == draft.shape == (2, SIZE * 16)
    assert context.dtype == np.uint8
    assert context.view(np.int64).tolist() == [[44, 45, 46, 47, 4, 5, 6, 7], [40, 41, 42, 43, 0, 1, 2, 3]]
    assert (window == context[0]).all()
    assert (draft == context).all()


async def test_blocks_written_elsewhere_serve_as_the_originals_did(bench: Bench) -> None:
    whole, window = await bench.access.read([(0, blocks(*BLOCKS)), (1, blocks(*BLOCKS))])
    places = [[1, 3, 4, 6], [9, 8, 3, 1]]
    for table, data in ((0, whole), (1, window)):
        garbage: list[Any] = [np.full_like(array, 0x5A) for array in data]
        await bench.access.write(table, blocks(*BLOCKS), garbage)
        await bench.access.write(table, blocks(*places[table]), [*data])
    assert (bench.run([7], 13, places) == expected(np.array([*IDS, 7]), OPTIONS)).all()
    assert (bench.run([7], 13, [places[0], BLOCKS]) != expected(np.array([*IDS, 7]), OPTIONS)).any()


async def test_a_group_given_as_none_is_left_alone(bench: Bench) -> None:
    [[_, draft]] = await bench.access.read([(0, blocks(5))])
    await bench.access.write(0, blocks(2), [None, draft])
    [[context, written]] = await bench.access.read([(0, blocks(2))])
    assert context.view(np.int64)[0, :4].tolist() == [44, 45, 46, 47]
    assert (written == draft).all()
    assert (bench.run([7], 13, [BLOCKS, BLOCKS]) == expected(np.array([*IDS, 7]), OPTIONS)).all()


async def test_copies_are_made_in_order_in_all_groups(bench: Bench) -> None:
    await bench.access.copy(0, blocks(5, 2, 1), blocks(1, 5, 9))
    [[context, draft]] = await bench.access.read([(0, blocks(1, 5, 9))])
    assert context.view(np.int64)[:, 0].tolist() == [40, 44, 40]
    assert (draft == context).all()
    assert (bench.backend.hashes[0] == mix(bench.backend.pools[0][0])).all()


async def test_stages_run_in_the_order_they_were_queued(bench: Bench) -> None:
    garbage: list[Any] = [np.full((1, SIZE * 16), 1, np.uint8)] * 2
    before, _, after = await asyncio.gather(
        bench.access.read([(0, blocks(2))]), bench.access.write(0, blocks(2), garbage),
        bench.access.read([(0, blocks(2))]),
    )
    assert before[0][0].view(np.int64)[0, 0] == 44
    assert (after[0][0] == 1).all()


async def test_nothing_is_read_where_nothing_is_wanted(bench: Bench) -> None:
    assert await bench.access.read([]) == []
    [[context, _]] = await bench.access.read([(0, blocks())])
    assert context.shape == (0, SIZE * 16)
    await bench.access.write(0, blocks(), [context, context])


@pytest.mark.parametrize(("table", "numbers", "data", "told"), [
    (2, [1], [None], "no block table 2"),
    (0, [10], [None, None], "blocks 0 to 9, found 10"),
    (0, [3, -1], [None, None], "found -1"),
    (0, [1], [None], "1 arrays for the 2 KV groups"),
    (0, [1], [np.zeros((1, 63), np.uint8), None], r"'context' are uint8 \(1, 64\)"),
    (0, [1], [None, np.zeros((1, 64), np.int8)], "found int8"),
])
async def test_what_does_not_fit_is_refused_and_nothing_touched(
    bench: Bench, table: int, numbers: list[int], data: list[Any], told: str
) -> None:
    before = [pool.copy() for pool in bench.backend.pools]
    with pytest.raises(ValueError, match=told):
        await bench.access.write(table, blocks(*numbers), data)
    if data[0] is None and len(data) == 2 and data[1] is None:
        for call in (bench.access.read([(table, blocks(*numbers))]),
                     bench.access.copy(table, blocks(*numbers), blocks(*numbers))):
            with pytest.raises(ValueError, match=told):
                await call
    assert all((a == b).all() for a, b in zip(before, bench.backend.pools, strict=True))


async def test_before_the_load_there_are_no_blocks() -> None:
    bench = Bench()
    with pytest.raises(ValueError, match="not been told to load"):
        await bench.access.read([(0, blocks(1))])
    bench.load()
    with pytest.raises(ValueError, match="cannot be copied"):
        await bench.access.copy(0, blocks(1, 2), blocks(3))
    bench.device.close()


async def test_blocks_that_move_while_steps_run_stay_as_they_are(bench: Bench) -> None:
    """Steps of another sequence go on in blocks of their own while those of ours are moved about."""
    others = [8, 9]
    wrong = []

    def step(n: int) -> None:
        ids = list(range(n, n + 7))
        if (bench.run(ids, 0, [others, others]) != expected(np.array(ids), OPTIONS)).any():
            wrong.append(n)

    steps = [bench.device.submit(lambda n=n: step(n), "execute") for n in range(200)]
    here, there = blocks(*BLOCKS), blocks(1, 3, 4, 6)
    for _ in range(20):
        for table in (0, 1):
            [data] = await bench.access.read([(table, here)])
            await bench.access.write(table, there, [*data])
            await bench.access.write(table, here, [np.zeros_like(array) for array in data])
            [found] = await bench.access.read([(table, there)])
            assert all((a == b).all() for a, b in zip(found, data, strict=True))
        here, there = there, here
    await asyncio.gather(*steps)
    assert not wrong
    assert (bench.run([7], 13, [here.tolist()] * 2) == expected(np.array([*IDS, 7]), OPTIONS)).all()
