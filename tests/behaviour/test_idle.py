"""A deployment that nobody uses leaves the processor alone."""

import asyncio
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from tests.harness import Server
from tests.probes import Deployment
from tests.recorders import Echo, Echoed, Side, introduce, settled

from antiphon.runtime.cell import SWITCH_INTERVAL


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="i") as made:  # short: sockets lie below it
        yield Path(made)


async def test_a_post_without_asks_in_flight_has_nothing_scheduled() -> None:
    context: zmq.Context[Any] = zmq.Context()
    one, two = Side(context, "one", "a"), Side(context, "two", "b")
    introduce(one, two)
    assert await one["a"].ask("b", Echo("x"), Echoed) == Echoed("x")
    await settled(lambda: one.post._sweeper is None)
    await asyncio.sleep(0.01)
    loop: Any = asyncio.get_running_loop()
    assert [handle for handle in loop._scheduled if not handle.cancelled() and "antiphon" in repr(handle)] == []
    for side in (one, two):
        side.post.close()
    context.destroy(linger=0)


def wakes(processes: list[psutil.Process], seconds: float) -> float:
    """Times a second that any thread of the processes was woken."""
    def count() -> int:
        return sum(process.num_ctx_switches().voluntary for process in processes)

    before, began = count(), time.monotonic()
    time.sleep(seconds)
    return (count() - before) / (time.monotonic() - began)


def test_an_idle_deployment_is_hardly_ever_woken(home: Path) -> None:
    """Counted, not timed: a loop that polls every 10 ms would be woken 100 times a second."""
    idle = '[actors.NAME]\nkind = "probe"\ncell = "NAME"\noptions = { home = "HOME", start = "idle" }\n'
    with Deployment(home, idle.replace("NAME", "a") + idle.replace("NAME", "b")) as probes:
        everybody = [psutil.Process(probes.process.pid), *probes.cells().values()]
        time.sleep(0.5)
        assert wakes(everybody, 1.0) < 30
        assert probes.stop() == 0


@pytest.mark.bench
def test_what_an_idle_server_uses(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run alone: ``pytest -m bench tests/behaviour/test_idle.py -s``."""
    with Server(home) as server:
        time.sleep(2)
        everybody = {"root": psutil.Process(server.process.pid), **server.cells()}
        seconds = 10.0

        def used() -> dict[str, float]:
            return {name: sum(process.cpu_times()[:2]) for name, process in everybody.items()}

        before = used()
        wakeups = wakes(list(everybody.values()), seconds)
        after = used()
        percent = {name: 100 * (after[name] - before[name]) / seconds for name in everybody}
        with capsys.disabled():
            print(f"\nidle server, {seconds:.0f} s: {sum(percent.values()):.2f} % of one core "
                  f"({', '.join(f'{name} {value:.2f}' for name, value in percent.items())}), {wakeups:.1f} wakes/s")
        assert sum(percent.values()) < 1.0
        assert server.stop() == 0


@pytest.mark.bench
@pytest.mark.parametrize("interval", [0.005, 0.001, SWITCH_INTERVAL, 0.00005])
async def test_what_an_ask_takes_beside_a_thread_that_runs_python(
        interval: float, capsys: pytest.CaptureFixture[str]) -> None:
    """The argument for SWITCH_INTERVAL."""
    context: zmq.Context[Any] = zmq.Context()
    side = Side(context, "one", "a", "b")
    over, rounds = threading.Event(), 0

    def work() -> None:
        nonlocal rounds
        while not over.is_set():
            sum(i * i for i in range(200))
            rounds += 1

    before = sys.getswitchinterval()
    thread = threading.Thread(target=work)
    thread.start()
    try:
        sys.setswitchinterval(interval)
        took, began, done = [], time.perf_counter(), rounds
        while time.perf_counter() - began < 2.0:
            asked = time.perf_counter()
            await side["a"].ask("b", Echo("x"), Echoed)
            took.append(time.perf_counter() - asked)
            await asyncio.sleep(0.002)  # a step's rhythm: the loop mostly waits
        rate = (rounds - done) / (time.perf_counter() - began)
    finally:
        sys.setswitchinterval(before)
        over.set()
        thread.join()
        side.post.close()
        context.destroy(linger=0)
    took.sort()
    with capsys.disabled():
        print(f"\nswitch interval {1e3 * interval:.2f} ms: an ask takes {1e3 * took[len(took) // 2]:.2f} ms at the "
              f"median, {1e3 * took[len(took) * 99 // 100]:.2f} at the 99th percentile; "
              f"the thread does {rate:.0f} rounds/s")
