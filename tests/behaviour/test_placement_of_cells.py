"""Where an actor runs is one line of the config: what actors see is the same, and the order of start and stop holds."""

import json
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.probes import Deployment


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="c") as directory:  # short: sockets lie below it
        yield Path(directory)


def actors(*cells: str) -> str:
    """Three actors: a uses b, b uses c; c stands last in the file."""
    kinds = (("a", "caller", 'uses = ["b"]'), ("b", "middleman", 'uses = ["c"]'), ("c", "probe", ""))
    return "".join(
        f'[actors.{name}]\nkind = "{kind}"\ncell = "{cell}"\n{uses}\noptions = {{ home = "HOME" }}\n'
        for (name, kind, uses), cell in zip(kinds, cells, strict=True))


PLACEMENTS = {"one cell": ("x", "x", "x"), "one apart": ("x", "y", "x"), "all apart": ("x", "y", "z")}


@pytest.mark.parametrize(("placement", "delivery"), [
    ("one cell", "zmq"), ("one cell", "direct"), ("one apart", "direct"), ("all apart", "zmq")])
def test_actors_talk_alike_wherever_they_run(home: Path, placement: str, delivery: str) -> None:
    cells = PLACEMENTS[placement]
    with Deployment(home, actors(*cells), f"delivery = '{delivery}'") as probes:
        assert set(probes.cells()) == set(cells)
        for instance, other in (("a", "b"), ("b", "c"), ("c", "a")):
            probes.do(instance, f"ask {other} hello")
            probes.until(lambda i=instance: any("answer hello" in line for line in probes.journal(i)), "an answer")  # type: ignore[misc]
            probes.do(instance, f"ask {other} fail")
            probes.hears(instance, f"failed AskFailed: Try to {other}: Boom: told to")
        probes.do("a", "tell c thank you")
        probes.hears("c", "do thank you")
        assert probes.stop() == 0
        for instance, cell in zip("abc", cells, strict=True):
            apart = {other for other, there in zip("abc", cells, strict=True) if there != cell}
            news = {line for line in probes.journal(instance) if line.endswith((" up", " down"))}
            assert news == {f"{other} up" for other in apart}, "news comes of other cells only"


def test_in_one_cell_the_used_start_before_and_stop_after_their_users(home: Path) -> None:
    with Deployment(home, actors("x", "x", "x")) as probes:
        assert probes.stop() == 0
        order = [line for line in probes.journal("all") if line.endswith((" started", " stopped"))]
        assert order == ["c started", "b started", "a started", "a stopped", "b stopped", "c stopped"]


def test_cells_that_use_others_stop_first_and_each_leaves_its_trace(home: Path) -> None:
    with Deployment(home, actors("x", "y", "z"), environment={"ANTIPHON_TRACE": str(home / "traces")}) as probes:
        (directory,) = probes.run.iterdir()
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700, "sockets are for this user only"
        assert sorted(path.name.partition(".")[0] for path in directory.iterdir()) == ["lock", "root", "x", "y", "z"]
        probes.do("a", "ask b hello")
        probes.until(lambda: any("answer hello" in line for line in probes.journal("a")), "an answer")
        assert probes.stop() == 0
        order = [line for line in probes.journal("all") if line.endswith(" stopped")]
        assert order == ["a stopped", "b stopped", "c stopped"]
        traces = {path.name.partition("-")[0]: path for path in (home / "traces").iterdir()}
        assert set(traces) >= {"x", "y"}
        events = json.loads(traces["y"].read_text())["traceEvents"]
        tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        assert ("b", "Try") in {(tracks[e["tid"]], e["name"]) for e in events if e["ph"] == "X"}
