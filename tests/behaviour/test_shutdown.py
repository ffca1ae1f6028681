"""Every way a deployment can end: its exit code, who may still finish, and that nothing is left behind."""

import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.probes import Deployment, Probe, install

from antiphon.runtime import check, directory, log
from antiphon.runtime.errors import CellFailed
from antiphon.runtime.inprocess import InProcess


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="e") as made:  # short: sockets lie below it
        yield Path(made)


def actors(a: str = "", b: str = "") -> str:
    return "".join(
        f'[actors.{name}]\nkind = "probe"\ncell = "{cell}"\noptions = {{ home = "HOME", start = "{start}" }}\n'
        for name, cell, start in (("a", "one", a), ("b", "two", b)))


PATIENT = "[deadlines]\nstop = '60s'\n"


# ---- told to stop


def test_a_signal_stops_every_actor_and_exits_with_zero(home: Path) -> None:
    with Deployment(home, actors(a="file", b="file")) as probes:
        assert len(list(home.glob("*.sock"))) == 2
        probes.signal(signal.SIGTERM)
        assert probes.ends() == 0
        assert probes.journal("a")[-2:] == probes.journal("b")[-2:] == ["stopping", "stopped"]
        assert "Traceback" not in probes.output()


@pytest.mark.parametrize("moment", ["running", "spawned"])
def test_ctrl_c_in_a_terminal_reaches_the_whole_group_and_is_an_orderly_stop(home: Path, moment: str) -> None:
    with Deployment(home, actors(), wait=moment == "running") as probes:
        probes.until(probes.spawned, "the cells' interpreters are loading")
        time.sleep(0.1)  # far enough to have handlers of their own, not far enough to ignore the signal
        os.killpg(probes.process.pid, signal.SIGINT)
        assert probes.ends() == 0
        if moment == "running":
            assert probes.journal("a")[-1] == probes.journal("b")[-1] == "stopped"
        assert "Traceback" not in probes.output()


def test_a_second_signal_ends_the_wait(home: Path) -> None:
    with Deployment(home, actors(a="never stop", b="block stop"), PATIENT) as probes:
        probes.signal()
        probes.until(lambda: "stopping" in probes.journal("a") + probes.journal("b"), "it begins to stop")
        assert probes.process.poll() is None
        probes.signal()
        assert probes.ends() == 0


@pytest.mark.parametrize("how", ["never stop", "block stop", "raise stop"])
def test_an_actor_that_does_not_stop_holds_up_nobody_beyond_the_deadline(home: Path, how: str) -> None:
    both = actors(b=how).replace('cell = "two"', 'cell = "one"')  # in one cell: b, the later, is stopped first
    with Deployment(home, both, "[deadlines]\nstop = '300ms'\n") as probes:
        assert probes.stop() == 0
        assert probes.journal("b")[-1] == "stopping"
        if how == "block stop":
            assert "cell did not stop in time" in probes.output()
        else:
            assert probes.journal("a")[-1] == "stopped"
            said = "actor did not stop in time" if how == "never stop" else "actor failed to stop"
            assert said in probes.output()


# ---- told to stop while it starts


@pytest.mark.parametrize("start", ["hang", "block"])
def test_a_signal_during_the_start_ends_it_with_zero(home: Path, start: str) -> None:
    with Deployment(home, actors(a="file", b=start), wait=False) as probes:
        probes.hears("b", "starting")
        probes.hears("a", "started")
        probes.signal()
        assert probes.ends() == 0
        assert probes.journal("a")[-1] == "stopped"
        if start == "hang":
            assert probes.journal("b")[-3:] == ["start given up", "stopping", "stopped"]


@pytest.mark.slow
def test_a_signal_at_any_moment_of_the_start_leaves_nothing(home: Path) -> None:
    rng = random.Random(int(os.environ.get("ANTIPHON_TEST_SEED", "1")))
    for number in range(20):
        with Deployment(home, actors(a="file"), wait=False) as probes:
            time.sleep(rng.uniform(0.1, 0.7))
            probes.signal(rng.choice([signal.SIGTERM, signal.SIGINT]))
            assert probes.ends() in (0, -signal.SIGTERM, 130), f"round {number}: {probes.output()}"


# ---- killed


@pytest.mark.parametrize("moment", ["running", "starting", "stopping", "stuck"])
def test_cells_end_with_their_root_and_remove_what_is_left(home: Path, moment: str) -> None:
    how = {"running": "file", "starting": "file,hang", "stopping": "file,never stop", "stuck": "file"}[moment]
    with Deployment(home, actors(a="file", b=how), PATIENT, wait=moment != "starting") as probes:
        match moment:
            case "starting":
                probes.hears("b", "starting")
                probes.hears("a", "started")
            case "stopping":
                probes.signal()
                probes.hears("b", "stopping")
            case "stuck":
                probes.do("b", "block")
                probes.hears("b", "do block")
        probes.process.kill()
        assert probes.ends() == -signal.SIGKILL


def test_a_root_killed_before_its_cells_are_up_leaves_nothing(home: Path) -> None:
    with Deployment(home, actors(), wait=False) as probes:
        probes.until(probes.spawned, "the cells' interpreters are loading")
        probes.process.kill()
        assert probes.ends() == -signal.SIGKILL


def test_a_cell_whose_root_died_before_a_word_removes_the_directory(home: Path) -> None:
    sockets = home / "sockets"
    sockets.mkdir()
    (sockets / "root.1").touch()
    command = [sys.executable, "-P", "-m", "antiphon.runtime.cell", "main", str(sockets)]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stderr) == (71, "")
    assert not sockets.exists()


def test_what_a_killed_cell_has_left_is_removed_with_the_deployment(home: Path) -> None:
    with Deployment(home, actors(b="file"), "[supervision]\nrestarts = 0\n") as probes:
        assert (home / "b.sock").exists()
        probes.cells()["two"].kill()
        assert probes.ends() == 70
        assert probes.journal("a")[-1] == "stopped"


def test_a_cell_killed_just_before_the_stop_is_no_failure_and_not_waited_for(home: Path) -> None:
    with Deployment(home, actors(), PATIENT) as probes:
        victim = probes.cells()["two"]
        probes.signal(signal.SIGSTOP)
        probes.until(lambda: psutil.Process(probes.process.pid).status() == psutil.STATUS_STOPPED, "it sleeps")
        probes.signal(signal.SIGTERM)
        victim.kill()
        probes.signal(signal.SIGCONT)
        assert probes.ends() == 0


def test_what_everybody_killed_at_once_leaves_is_swept_at_the_next_start(home: Path) -> None:
    with Deployment(home, actors(b="file")) as probes:
        everybody = [psutil.Process(probes.process.pid), *probes.cells().values()]
        for process in everybody:
            process.send_signal(signal.SIGSTOP)
        probes.until(lambda: all(p.status() == psutil.STATUS_STOPPED for p in everybody), "nobody can react")
        for process in everybody:
            process.kill()
        probes.process.wait()
        probes.until(lambda: not probes.cells(), "all are dead")
        (old,) = probes.run.iterdir()
    with Deployment(home, actors(b="file")) as probes:
        probes.until(probes.ready, "ready")
        assert old not in list(probes.run.iterdir())
        assert probes.stop() == 0


# ---- the directory of the sockets


@pytest.fixture
def runtime(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home))
    return home


def test_a_living_deployment_is_not_swept(runtime: Path) -> None:
    first, second = directory.Directory(30), directory.Directory(30)
    assert {Path(first.path), Path(second.path)} == set(runtime.iterdir())
    first.close()
    first.close()
    assert list(runtime.iterdir()) == [Path(second.path)]
    second.close()


def test_a_directory_is_dead_when_its_lock_is_free_whatever_the_process_id_says(runtime: Path) -> None:
    dead, fresh, foreign = (runtime / f"antiphon-{os.getuid()}-{os.getpid()}-{name}" for name in ("dead", "new", "old"))
    for made in (dead, fresh, foreign):
        made.mkdir()
    (dead / directory.LOCK).touch()
    (dead / "main.1").touch()
    os.utime(foreign, (1, 1))  # without a lock for an hour: its owner died between two lines
    other = runtime / "antiphon-999999-1-x"
    other.mkdir()
    directory.sweep(runtime)
    assert set(runtime.iterdir()) == {fresh, other}, "another user's, and one that is just being made, stay"


def test_a_path_too_long_for_sockets_is_avoided(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = home / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    made = directory.Directory(30)
    try:
        assert not made.path.startswith(str(long))
    finally:
        made.close()
    monkeypatch.setattr(directory, "homes", lambda: [long])
    with pytest.raises(CellFailed, match="set XDG_RUNTIME_DIR to a short one"):
        directory.Directory(30)


def test_a_runtime_directory_that_does_not_exist_is_no_trouble(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home / "gone"))
    directory.Directory(30).close()


# ---- inside a program


Start = Callable[..., InProcess]


@pytest.fixture
def inside(home: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """A deployment inside this process, not yet started."""
    install(home)
    monkeypatch.syspath_prepend(home)
    log.configure("error", "json")

    def make(*starts: str, settings: str = "") -> InProcess:
        config = home / "probes.toml"
        both = actors(*starts).replace("HOME", str(home))
        config.write_text(f"schema = 1\n{settings}\n[log]\nlevel = 'error'\n{both}")
        return InProcess(check.examine(str(config))[0])

    return make


def journal(home: Path, instance: str) -> list[str]:
    return (home / f"{instance}.log").read_text().splitlines()


def test_twenty_deployments_inside_a_program_leave_nothing(home: Path, inside: Start) -> None:
    def once() -> None:
        deployment = inside("file")
        deployment.start()
        assert deployment.call(lambda cell: sorted(cell.runners)) == ["@main", "a", "b"]
        deployment.stop()
        deployment.stop()

    once()
    gc.collect()
    process = psutil.Process()
    interval, descriptors, threads = sys.getswitchinterval(), process.num_fds(), threading.active_count()
    for _ in range(20):
        once()
    gc.collect()
    assert process.num_fds() <= descriptors
    assert threading.active_count() == threads
    assert sys.getswitchinterval() == interval
    assert not list(home.glob("*.sock"))
    assert journal(home, "a")[-1] == "stopped"


@pytest.mark.parametrize(("start", "said"), [
    ("raise", r"actor 'b': Boom\('no start'\)"),
    ("no constructor", r"actor 'b': Boom\('no constructor'\)"),
    ("hang", r"actor 'b': CellFailed\('not started within 0.5 s'\)"),
])
def test_a_start_that_fails_inside_a_program_says_why(home: Path, inside: Start, start: str, said: str) -> None:
    threads = threading.active_count()
    deployment = inside("file", start, settings="[deadlines]\nstart = '500ms'\n")
    with pytest.raises(CellFailed, match=said):
        deployment.start()
    assert threading.active_count() == threads
    assert not list(home.glob("*.sock"))
    if start != "no constructor":
        assert journal(home, "a")[-1] == "stopped"
    deployment.stop()


def test_a_failure_later_on_surfaces_and_ends_the_others(home: Path, inside: Start) -> None:
    threads = threading.active_count()
    deployment = inside("file")
    deployment.start()
    deployment.check()
    (home / "b.do").write_text("fail")
    ends = time.monotonic() + 10
    while threading.active_count() > threads:
        assert time.monotonic() < ends
        time.sleep(0.01)
    with pytest.raises(CellFailed, match=r"actor 'b': Boom\('told to'\)"):
        deployment.check()
    with pytest.raises(CellFailed):
        deployment.call(lambda cell: cell)
    assert journal(home, "a")[-1] == "stopped"
    assert not list(home.glob("*.sock"))
    deployment.stop()


def test_two_deployments_inside_one_program_do_not_disturb_each_other(home: Path, inside: Start) -> None:
    interval = sys.getswitchinterval()
    one, two = inside(), inside()
    one.start()
    two.start()
    one.stop()
    assert sys.getswitchinterval() != interval
    two.call(lambda cell: cell.post.tell("@main", "a", _do()))
    two.stop()
    assert sys.getswitchinterval() == interval
    assert "do hello" in journal(home, "a")


def _do() -> object:
    from tests.probes import Do

    return Do("hello")


def test_stopping_what_never_started_is_nothing(inside: Start) -> None:
    inside().stop()


def test_a_thread_that_an_actor_blocks_is_not_waited_for_for_ever(
        home: Path, inside: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.runtime.inprocess.SLACK", 0.2)
    monkeypatch.setattr(Probe, "on_do", lambda self, message: time.sleep(0.8))
    deployment = inside()
    deployment.start()
    (home / "b.do").write_text("block")
    while (home / "b.do").exists():
        time.sleep(0.01)
    with pytest.raises(CellFailed, match="an actor has blocked its loop"):
        deployment.stop(0.1)
    deployment._thread.join(10)
