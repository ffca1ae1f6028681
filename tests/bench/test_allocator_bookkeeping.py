"""What the bookkeeping costs: ``pytest -m bench -s tests/bench/test_allocator_bookkeeping.py`` shows it."""

import time
from pathlib import Path

import numpy as np
import pytest
from tests.memory import allocator, close, commit, opening, reserve

from antiphon.actors.columns import pack, ramp
from antiphon.actors.protocol import Commit, Reserve

BATCH, CONTEXT, STEPS = 256, 8192, 512


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path))


def microseconds(seconds: list[float]) -> str:
    sorted_ = np.sort(np.array(seconds)) * 1e6
    return f"{sorted_.mean():8.1f} mean {sorted_[len(sorted_) // 2]:8.1f} median {sorted_[-1]:8.1f} most"


@pytest.mark.bench
@pytest.mark.timeout(600)
@pytest.mark.parametrize("windows", [(), (1024,)], ids=["whole", "window"])
@pytest.mark.parametrize("cache", ["plain", "hash", "radix"])
def test_a_decode_step_of_256_sequences_of_8k_tokens(cache: str, windows: tuple[int, ...]) -> None:
    blocks = BATCH * (CONTEXT + STEPS + 64) // 16
    made = allocator(cache, windows=windows, block_size=16, blocks=blocks)
    numbers = list(range(BATCH))
    lengths = CONTEXT - np.arange(BATCH, dtype=np.int32)  # so that their blocks fill at different steps
    for number in numbers:
        rng = np.random.default_rng(number)
        made.on_open(opening(number, rng.integers(0, 1000, lengths[number] + 1).tolist()))
        assert not reserve(made, number, int(lengths[number]) + 1).short
        commit(made, number, int(lengths[number]), [1])
    granted = np.array([len(made.ledger.holds[n].blocks[0]) * 16 for n in numbers])
    commits, reserves = [], []
    handles, offsets = pack(numbers), ramp(BATCH + 1)
    for step in range(STEPS):
        lengths += 1
        ids = pack(np.arange(BATCH, dtype=np.int32) + step)
        message = Commit(step, handles, pack(lengths - 1), bytes(4 * BATCH + 4), b"", offsets, ids, pack(lengths))
        began = time.perf_counter()
        made.on_commit(message)
        commits.append(time.perf_counter() - began)
        short = np.flatnonzero(lengths + 1 > granted)
        if len(short):
            asked = Reserve(step, pack(short), pack(lengths[short] + 1), pack(lengths[short] + 33))
            began = time.perf_counter()
            answer = made.on_reserve(asked)
            reserves.append(time.perf_counter() - began)
            granted[short] = np.frombuffer(answer.granted, dtype="<i4")
    print(f"\n{cache:6} {'window' if windows else 'whole ':6} commit  us/step {microseconds(commits)}")
    print(f"{'':13} reserve us/step {sum(reserves) / STEPS * 1e6:8.1f} mean")


@pytest.mark.bench
@pytest.mark.parametrize("cache", ["plain", "hash", "radix"])
def test_the_look_up_of_a_prompt_of_100k_tokens(cache: str) -> None:
    made = allocator(cache, block_size=16, blocks=3 * 6400)
    ids = np.random.default_rng(0).integers(0, 1000, 100_000).tolist()
    print()
    for number, what in enumerate(("first", "again", "again")):
        message = opening(number, ids)
        began = time.perf_counter()
        made.on_open(message)
        opened = time.perf_counter()
        reserved = reserve(made, number, 512)
        ended = time.perf_counter()
        hit = int(np.frombuffer(reserved.hits, dtype="<i4")[0])
        print(f"{cache:6} {what}: open {(opened - began) * 1e3:6.2f} ms, reserve {(ended - opened) * 1e3:6.2f} ms, "
              f"hit {hit}")
        reserve(made, number, 100_000)
        began = time.perf_counter()
        commit(made, number, 100_000)
        closing = time.perf_counter()
        close(made, number)
        print(f"       all {max(0, 100_000 - hit)} slots committed {(closing - began) * 1e3:6.2f} ms, "
              f"closed {(time.perf_counter() - closing) * 1e3:6.2f} ms")
