"""Deaths of cells: who hears of them, who comes back, when it is enough, and what is said about it."""

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.probes import Deployment, install

from antiphon.runtime import check, log, root

A = '[actors.a]\nkind = "probe"\ncell = "one"\noptions = { home = "HOME" }\n'
B = '[actors.b]\nkind = "probe"\ncell = "two"\noptions = { home = "HOME" }\n'
PATIENT = "[supervision]\nrestarts = 100\nbackoff = '10ms'\n"


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="s") as directory:  # short: sockets lie below it
        yield Path(directory)


def b(**options: str) -> str:
    """Actor b with other settings; START goes into its options."""
    start = options.pop("start", "")
    lines = "".join(f"{key} = {value!r}\n" for key, value in {"cell": "two", **options}.items())
    return f'[actors.b]\nkind = "probe"\n{lines}options = {{ home = "HOME", start = "{start}" }}\n'


# ---- noticed and brought back


@pytest.mark.parametrize("end", ["killed", "exit", "turn fails", "activity fails"])
def test_a_dead_cell_is_noticed_and_comes_back_with_a_new_epoch(home: Path, end: str) -> None:
    with Deployment(home, A + B) as probes:
        probes.do("a", "ask b first")
        probes.until(lambda: any("answer first" in line for line in probes.journal("a")), "an answer")
        probes.do("a", "ask b fail")
        probes.hears("a", "failed AskFailed: Try to b: Boom: told to")
        assert probes.journal("b").count("started") == 1, "an ask that fails ends nobody"
        probes.do("a", "ask b never")
        probes.until(lambda: not (home / "a.do").exists(), "the question is asked")
        time.sleep(0.05)
        pids = {name: process.pid for name, process in probes.cells().items()}
        match end:
            case "killed":
                probes.cells()["two"].kill()
            case "exit":
                probes.do("b", "exit")
            case "activity fails":
                probes.do("b", "fail")
            case "turn fails":
                probes.do("a", "tell b fail")
        probes.hears("a", "failed PeerRestarted: two died while Try to b was in flight")
        probes.hears("a", "b up", 2)
        journal = probes.journal("a")
        assert [line for line in journal if line in ("b up", "b down")] == ["b up", "b down", "b up"]
        assert journal.count("started") == 1, "the other lives on, also if it sent what the dead one could not stand"
        assert probes.journal("b").count("started") == 2
        assert probes.cells()["one"].pid == pids["one"]
        assert probes.cells()["two"].pid != pids["two"]
        probes.do("a", "ask b second")
        probes.until(lambda: any("answer second" in line for line in probes.journal("a")), "an answer")
        epochs = [int(line.split()[3].rstrip(",")) for line in probes.journal("a") if line.startswith("answer")]
        assert epochs[1] == epochs[0] + 1
        assert probes.stop() == 0
        if "fails" in end:
            assert '"culprit": "b", "cause": "Boom(\'told to\')"' in probes.output()
            assert "raise Boom" in probes.output(), "with its stack"
        elif end == "exit":
            assert '"cause": "exit code 3"' in probes.output()
        else:
            assert '"cause": "signal 9"' in probes.output()


@pytest.mark.slow
def test_cells_may_die_together_and_come_back_together(home: Path) -> None:
    with Deployment(home, A + B) as probes:
        for process in probes.cells().values():
            process.kill()
        probes.hears("a", "b up", 2)
        probes.hears("b", "a up", 2)
        assert probes.stop() == 0


def test_a_cell_that_dies_while_it_starts_again_is_tried_again(home: Path) -> None:
    with Deployment(home, A + b(start="raise while bad"), PATIENT) as probes:
        (home / "bad").touch()
        probes.cells()["two"].kill()
        probes.until(lambda: probes.output().count("cell did not start") >= 2, "two attempts")
        assert '"culprit": "b", "cause": "Boom(\'no start\')", "event": "cell did not start"' in probes.output()
        (home / "bad").unlink()
        probes.hears("a", "b up", 2)
        assert probes.stop() == 0


def test_a_cell_that_hangs_while_it_starts_again_is_tried_again(home: Path) -> None:
    with Deployment(home, A + b(start="block while bad"), PATIENT + "[deadlines]\nstart = '1s'\n") as probes:
        (home / "bad").touch()
        probes.cells()["two"].kill()
        probes.until(lambda: "cell did not start" in probes.output(), "it is given up")
        (home / "bad").unlink()
        assert '"culprit": "b"' in probes.output()
        probes.hears("a", "b up", 2)
        assert probes.stop() == 0


@pytest.mark.slow
def test_the_pause_before_a_restart_doubles(home: Path) -> None:
    with Deployment(home, A + B, "[supervision]\nbackoff = '200ms'\n") as probes:
        for number, pause in enumerate((0.2, 0.4), start=1):
            probes.cells()["two"].kill()
            probes.hears("a", "b down", number)
            began = time.monotonic()
            probes.hears("a", "b up", number + 1)
            assert time.monotonic() - began > pause - 0.05
        assert probes.stop() == 0


# ---- enough is enough


def test_too_many_deaths_end_the_deployment_and_say_why(home: Path) -> None:
    with Deployment(home, A + B, "[supervision]\nrestarts = 1\nbackoff = '10ms'\n") as probes:
        probes.do("b", "fail")
        probes.hears("a", "b up", 2)
        probes.do("b", "fail")
        assert probes.ends() == 70
        assert ("cell 'two' died 2 times within 60 s; last cause: actor 'b': Boom('told to')"
                in probes.output().splitlines()[-1])
        assert probes.journal("a")[-1] == "stopped", "the others could say goodbye"


def test_deaths_that_lie_far_apart_are_not_added_up(home: Path) -> None:
    with Deployment(home, A + B, "[supervision]\nrestarts = 1\nwithin = '300ms'\nbackoff = '10ms'\n") as probes:
        for number in range(1, 3):
            probes.cells()["two"].kill()
            probes.hears("a", "b up", number + 1)
            time.sleep(0.35)
        assert probes.stop() == 0


ONCE = "[supervision]\nrestarts = 1\nbackoff = '10ms'\n"


def test_an_optional_actor_that_keeps_failing_gets_its_stand_in_and_that_is_all_it_gets(home: Path) -> None:
    """It shares its cell with one that is not optional; the culprit is known."""
    with Deployment(home, A + b(plugin="wild", on_failure="degrade", cell="one"), ONCE) as probes:
        for number in (1, 2):
            probes.do("a", "tell b trick")
            probes.hears("b", "started", number + 1)
        assert [line for line in probes.journal("b") if line.startswith("made")] == [
            "made by WildTrick", "made by WildTrick", "made by PlainTrick"]
        assert "degraded: the plain stand-in takes over" in probes.output()
        probes.do("a", "ask b trick")
        probes.until(lambda: any(line.startswith("answer") for line in probes.journal("a")), "an answer")
        assert probes.journal("a")[-1].endswith("degraded: b")
        probes.do("b", "fail")
        probes.hears("b", "started", 4)
        probes.do("b", "fail")
        assert probes.ends() == 70, "the stand-in has its own chances and no stand-in"


def test_a_cell_of_optional_actors_only_is_degraded_whoever_is_to_blame(home: Path) -> None:
    c = b(plugin="wild", on_failure="degrade").replace("actors.b", "actors.c")
    with Deployment(home, A + b(plugin="wild", on_failure="degrade") + c, ONCE) as probes:
        for number in (1, 2):
            probes.cells()["two"].kill()
            probes.hears("a", "b up", number + 1)
            probes.hears("a", "c up", number + 1)
        assert probes.journal("b").count("made by PlainTrick") == 1
        assert probes.journal("c").count("made by PlainTrick") == 1
        probes.do("a", "ask b hello")
        probes.until(lambda: any(line.endswith(("degraded: b,c", "degraded: c,b")) for line in probes.journal("a")),
                     "other cells know")
        assert probes.stop() == 0


def test_a_cell_where_nobody_knows_who_is_to_blame_is_not_degraded(home: Path) -> None:
    with Deployment(home, A + b(plugin="wild", on_failure="degrade", cell="one"), ONCE) as probes:
        for number in (1, 2):
            probes.cells()["one"].kill()
            if number == 1:
                probes.hears("b", "started", 2)
        assert probes.ends() == 70
        assert "last cause: signal 9" in probes.output()


# ---- progress


QUICK = "[supervision]\nrestarts = 0\nbackoff = '10ms'\n[deadlines]\nstall = '1s'\n"


def test_an_actor_that_blocks_its_loop_is_found_named_and_degraded(home: Path) -> None:
    with Deployment(home, A + b(plugin="stuck", on_failure="degrade", cell="one"), QUICK) as probes:
        probes.do("a", "tell b trick")
        probes.hears("b", "made by PlainTrick")
        assert '"culprit": "b", "cause": "the loop is stuck in the turn of Do at b for' in probes.output()
        assert "time.sleep(1000)" in probes.output(), "with its stack"
        probes.hears("b", "started", 2)
        assert probes.stop() == 0


def test_a_cell_that_cannot_even_say_so_is_killed_by_the_root(home: Path) -> None:
    with Deployment(home, A + b(on_failure="degrade"), QUICK.replace("1s", "700ms")) as probes:
        probes.cells()["two"].send_signal(signal.SIGSTOP)
        probes.hears("a", "b up", 2)
        assert "cell makes no progress and is killed" in probes.output()
        assert "no reply within its deadline" in probes.output()
        assert probes.stop() == 0


@pytest.mark.slow
def test_a_deployment_that_was_stopped_and_goes_on_is_not_blamed(home: Path) -> None:
    with Deployment(home, A + B, QUICK) as probes:
        everybody = [psutil.Process(probes.process.pid), *probes.cells().values()]
        for process in everybody:
            process.send_signal(signal.SIGSTOP)
        time.sleep(4.0)
        for process in reversed(everybody):
            process.send_signal(signal.SIGCONT)
        probes.do("a", "ask b hello")
        probes.until(lambda: any("answer hello" in line for line in probes.journal("a")), "an answer")
        time.sleep(0.5)
        assert probes.journal("b").count("started") == 1
        assert probes.stop() == 0


# ---- a first start that fails


@pytest.mark.parametrize(("start", "said"), [
    ("raise", "cell 'two' did not get ready: actor 'b': Boom('no start')"),
    ("no constructor", "cell 'two' did not bind its sockets: actor 'b': Boom('no constructor')"),
    ("exit", "cell 'two' did not get ready: exit code 3"),
    ("hang", "cell 'two' did not get ready: actor 'b': CellFailed('not started within 1 s')"),
    ("block", "cell 'two' did not get ready: actor 'b': the loop is stuck in the activity 'start' of b for"),
])
def test_a_start_that_fails_ends_the_deployment_with_the_reason(home: Path, start: str, said: str) -> None:
    with Deployment(home, A + b(start=start), "[deadlines]\nstart = '1s'\n", wait=False) as probes:
        assert probes.ends() == 70
        assert said in probes.output().splitlines()[-1]
        assert not probes.ready()


def test_a_plugin_that_works_for_the_root_but_not_for_the_cell_is_named(home: Path) -> None:
    (home / "mine.py").write_text("import sys\nfrom tests.probes import Trick, Plugin, Options\n"
                                  "if 'serve' not in sys.argv: raise RuntimeError('not here')\n"
                                  "class Mine(Trick, Plugin[Options]): pass\n")
    with Deployment(home, A + b(plugin="./mine.py:Mine"), wait=False) as probes:
        assert probes.ends() == 70
        last = probes.output().splitlines()[-1]
        assert "cell 'two' did not bind its sockets: actor 'b': PluginError" in last
        assert "not here" in last


# ---- the handshake


async def deployed(home: Path, monkeypatch: pytest.MonkeyPatch) -> root.Root:
    """A root inside the test, with real cells."""
    install(home)
    (home / "run").mkdir()
    monkeypatch.syspath_prepend(home)
    paths = [str(home), str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home / "run"))
    config = home / "probes.toml"
    config.write_text(f"schema = 1\n{(A + B).replace('HOME', str(home))}")
    log.configure("error", "json")
    plan, _ = check.examine(str(config))
    return root.Root(plan)


async def test_a_cell_of_another_version_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = await deployed(home, monkeypatch)
    deployment._digest = "0123456789abcdef"
    assert await deployment.run() == 70
    assert "runs another version of Antiphon than its root" in str(deployment._failure)
    assert "0123456789abcdef" in str(deployment._failure)
    assert list((home / "run").iterdir()) == []


async def test_a_restart_after_an_upgrade_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    deployment = await deployed(home, monkeypatch)
    running = asyncio.ensure_future(deployment.run())
    await asyncio.wait_for(deployment.up.wait(), 20)
    deployment._digest = "0123456789abcdef"
    deployment.cells["two"].kill()
    assert await asyncio.wait_for(running, 20) == 70
    assert "cell 'two' runs another version" in str(deployment._failure)
    assert list((home / "run").iterdir()) == []


