"""Traces: off they cost nothing and write nothing; on they load where Chrome traces are looked at."""

import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.recorders import Note, Side

from antiphon.runtime import trace


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    before = str(trace._directory) if trace.enabled else ""
    yield
    trace.begin(before)


def load(path: Path | None) -> list[dict[str, Any]]:
    assert path is not None
    return list(json.loads(path.read_text())["traceEvents"])


def test_nothing_is_kept_or_written_unless_asked_for(tmp_path: Path) -> None:
    trace.begin("")
    trace.point("a", "work", trace.now())
    assert not trace.enabled
    assert trace.write("cell") is None
    trace.begin(str(tmp_path))
    assert trace.write("cell") is None, "and nothing where nothing happened"
    assert list(tmp_path.iterdir()) == []


def test_spans_name_their_cell_track_and_time(tmp_path: Path) -> None:
    trace.begin(str(tmp_path / "made" / "on demand"))
    began = trace.now()
    trace.point("scheduler", "step", began)
    trace.point("device", "execute", began)
    trace.point("scheduler", "step", trace.now())
    path = trace.write("front")
    assert path == tmp_path / "made" / "on demand" / f"front-{os.getpid()}.json"
    events = load(path)
    names = {(e["name"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {("process_name", None): "front", ("thread_name", 1): "scheduler", ("thread_name", 2): "device"}
    spans = [e for e in events if e["ph"] == "X"]
    assert [(e["tid"], e["name"]) for e in spans] == [(1, "step"), (2, "execute"), (1, "step")]
    for span in spans:
        assert {"pid", "tid", "ts", "dur"} <= span.keys()
        assert all(isinstance(span[key], int) for key in ("pid", "tid")), "viewers want numbers"
        assert span["dur"] >= 0
        assert span["ts"] >= began * 1e6


def test_the_ring_forgets_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace.begin(str(tmp_path))
    for i in range(trace.POINTS + 10):
        trace._ring.append(("t", str(i), 0.0, 0.0))
    assert len(trace._ring) == trace.POINTS
    assert trace._ring[0][1] == "10"


def test_a_trace_that_cannot_be_written_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    trace.begin(str(tmp_path / "file"))
    trace.point("a", "work", trace.now())
    assert trace.write("cell") is None


def test_other_threads_may_record_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_ring", deque(maxlen=3000))
    trace.begin(str(tmp_path))
    over = threading.Event()

    def record() -> None:
        while not over.is_set():
            trace.point("device", "stage", 0.0)

    thread = threading.Thread(target=record)
    thread.start()
    try:
        for _ in range(5):
            while not trace._ring:
                pass
            load(trace.write("cell"))
            trace._ring.clear()
    finally:
        over.set()
        thread.join()


async def test_every_turn_is_a_span(tmp_path: Path) -> None:
    import zmq

    context: zmq.Context[Any] = zmq.Context()
    side = Side(context, "one", "a", direct=True)
    trace.begin(str(tmp_path))
    side["a"].tell("a", Note("x"))
    side["a"].tell("a", Note("y"))
    while len(side["a"].heard) < 2:
        import asyncio

        await asyncio.sleep(0)
    spans = [e for e in load(trace.write("one")) if e["ph"] == "X"]
    assert [e["name"] for e in spans] == ["Note", "Note"]
    side.post.close()
    context.destroy(linger=0)


@pytest.mark.parametrize("wanted", [True, False])
def test_the_environment_switches_it_on(tmp_path: Path, wanted: bool) -> None:
    program = "from antiphon.runtime import trace as t; t.point('a', 'b', t.now()); print(t.write('c'))"
    environment = {**os.environ, "ANTIPHON_TRACE": str(tmp_path) if wanted else ""}
    subprocess.run([sys.executable, "-P", "-c", program], env=environment, check=True, capture_output=True)
    assert len(list(tmp_path.iterdir())) == wanted
