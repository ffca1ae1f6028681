"""What the benches compute from what they measure: workloads, figures, self time, the command line."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from antiphon.__main__ import main
from antiphon.plugins.bench import meter, null_steps, share
from antiphon.plugins.bench.figures import BenchError, Figures
from antiphon.plugins.bench.measure import Answers, run_workloads
from antiphon.plugins.bench.meter import Meter
from antiphon.plugins.bench.workloads import LETTERS, Prompt, Shared, Workloads, read
from antiphon.plugins.doors.client import Completion
from antiphon.plugins.doors.errors import Refused

SMALL = {
    "A": [[1, 2, 3], [4, 5, 6], [7, 8, 9]], "B": [[1, 2, 3, 4], [5, 6, 7, 8]],
    "C": [[[1, 2], [3, 4]], [[5, 6], [7, 8]]], "D": [{"cold": [[1, 2]], "warm": [[1, 3]]}], "E": [5, 6, 7],
}


def workloads(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "workloads.json"
    path.write_text(json.dumps(content))
    return path


# ---- workloads


def test_the_workloads_that_come_along_have_the_sizes_their_names_promise() -> None:
    found = read(None, LETTERS)
    assert [len(p) for p in found.A] == [128] * 4
    assert [len(p) for p in found.B] == [2048] * 4
    assert [{len(p) for p in group} for group in found.C] == [{256}] * 4
    assert [len(group) for group in found.C] == [32] * 4
    for pair in found.D:
        prompts = pair.cold + pair.warm
        assert len(pair.cold) == len(pair.warm) == 32
        assert {len(p) for p in prompts} == {1056}
        assert len({tuple(p[:1024]) for p in prompts}) == 1
    assert len(found.E) == 424


def test_runs_take_the_variants_after_the_first_in_turn() -> None:
    found = Workloads(A=[[1], [2], [3], [4]], D=[Shared([[1]], [[2]])])
    assert [found.variant(run, "A") for run in range(1, 6)] == [1, 2, 3, 1, 2]
    assert [found.variant(run, "D") for run in range(1, 3)] == [0, 0]


@pytest.mark.parametrize(("content", "letters", "reason"), [
    ("{", "A", "truncated"),
    ('{"A": 3}', "A", "Expected `array`, got `int` - at `$.A`; expected {\"A\": [[ids], ...]"),
    ('{"Z": []}', "A", "unknown field `Z`"),
    ('{"A": [[1]]}', "AE", "no workload E"),
    ('{"A": [[]]}', "A", "empty prompt"),
    ('{"C": [[]]}', "C", "no prompts"),
    ('{"A": [[-1]]}', "A", "no 31-bit number"),
])
def test_a_bad_file_of_prompts_is_explained(tmp_path: Path, content: str, letters: str, reason: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(BenchError) as caught:
        read(path, letters)
    assert str(caught.value).startswith(f"{path}: ")
    assert reason in str(caught.value)
    assert caught.value.code == 2


# ---- figures


def test_figures_are_one_json_object_a_line() -> None:
    figures = Figures()
    for value in (3.0, 1.0, 2.0):
        figures.add("A ttft_ms", value)
    (line,) = figures.lines(command="antiphon bench")
    assert json.loads(line) == {"metric": "A ttft_ms", "median": 2.0, "min": 1.0, "max": 3.0, "n": 3,
                                "command": "antiphon bench"}
    header, row = figures.table()
    assert header.split() == ["median", "min", "max", "n"]
    assert row.split() == ["A", "ttft_ms", "2", "1", "3", "3"]


def test_groups_stand_side_by_side() -> None:
    figures = Figures()
    figures.take("null zmq 1", {"us": [1.0, 2.0, 3.0], "steps": [9.0]}, batch=1)
    figures.take("null zmq 32", {"us": [40_000.0]}, batch=32)
    with pytest.raises(KeyError):
        list(figures.table())
    figures.take("null zmq 32", {"us": [40_000.0], "steps": [0.5]}, batch=32)
    assert [row.split() for row in figures.table()] == [
        ["null", "zmq", "1", "null", "zmq", "32"], ["us", "2", "40000"], ["steps", "9", "0.5"]]
    rows = [json.loads(line) for line in figures.lines()]
    assert [(row["metric"], row["batch"]) for row in rows] == [
        ("null zmq 1 us", 1), ("null zmq 1 steps", 1), ("null zmq 32 us", 32), ("null zmq 32 steps", 32)]


# ---- workloads measured


class Stopwatch:
    """Answers at once, with times that are easy to compute with: the first token after 0.5 s, then one each 0.1 s."""

    name = "none"

    def __init__(self) -> None:
        self.asked: list[tuple[list[Prompt], int]] = []
        self.short = 0

    async def forget(self) -> None:
        self.asked.append(([], 0))

    async def answer(self, prompts: Sequence[Prompt], tokens: int) -> Answers:
        self.asked.append((list(prompts), tokens))
        total = 0.5 + 0.1 * (tokens - 1)
        ids = [0] * (tokens - self.short)
        return Answers(4.0, [Completion("", ids, "length", list(p), 0, 0.5, total, 10.0) for p in prompts])


def test_metrics_have_the_names_and_formulas_of_the_other_engines_scripts(tmp_path: Path) -> None:
    door = Stopwatch()
    found = read(workloads(tmp_path, SMALL), LETTERS)
    figures = asyncio.run(run_workloads(door, found, LETTERS, 2, lambda _: None))
    assert figures.values == {
        "A ttft_ms": [500.0] * 2, "A decode_tok_s": [10.0] * 2, "B prefill_tok_s": [8.0] * 2, "C wall_s": [4.0] * 2,
        "C out_tok_s": [32.0] * 2, "D wall_s cold-prefix": [4.0] * 2, "D wall_s warm-prefix": [4.0] * 2,
        "D ttft_ms cold-prefix": [500.0] * 2, "D ttft_ms warm-prefix": [500.0] * 2, "E tok_s": [10.0] * 2,
    }
    warm_up, first, second = door.asked[:2], door.asked[2:9], door.asked[9:]
    assert warm_up == [([[1, 2, 3]], 8), ([[1, 2], [3, 4]], 4)]
    assert first == [([[4, 5, 6]], 128), ([[5, 6, 7, 8]], 1), ([[5, 6], [7, 8]], 64), ([], 0), ([[1, 2]], 32),
                     ([[1, 3]], 32),
                     ([[5, 6, 7]], 256)]
    assert second[0] == ([[7, 8, 9]], 128)


@pytest.mark.parametrize("letter", LETTERS)
def test_a_file_with_one_workload_is_enough_for_that_one(tmp_path: Path, letter: str) -> None:
    door = Stopwatch()
    found = read(workloads(tmp_path, {letter: SMALL[letter]}), letter)
    figures = asyncio.run(run_workloads(door, found, letter, 1, lambda _: None))
    assert {metric.partition(" ")[0] for metric in figures.values} == {letter}
    assert len(door.asked) == (4 if letter == "D" else 2)


def test_too_few_tokens_are_no_measurement(tmp_path: Path) -> None:
    door = Stopwatch()
    door.short = 1
    found = read(workloads(tmp_path, SMALL), LETTERS)
    with pytest.raises(BenchError, match="8 tokens were asked for, 7 came"):
        asyncio.run(run_workloads(door, found, LETTERS, 1, lambda _: None))


def test_a_refusal_says_what_the_prompts_need(tmp_path: Path) -> None:
    class Refusing(Stopwatch):
        async def answer(self, prompts: Sequence[Prompt], tokens: int) -> Answers:
            raise Refused("invalid", "token ids must lie in 0..5")

    found = read(workloads(tmp_path, SMALL), LETTERS)
    with pytest.raises(BenchError, match=r"token ids must lie in 0..5; these prompts have ids up to 3: .*vocabulary"):
        asyncio.run(run_workloads(Refusing(), found, LETTERS, 1, lambda _: None))


# ---- self time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that moves only when told to."""
    clock = SimpleNamespace(now=0.0)
    clock.perf_counter = lambda: clock.now
    monkeypatch.setattr(meter, "time", clock)
    return clock


def passes(clock: SimpleNamespace, seconds: float) -> None:
    clock.now += seconds


def test_nested_spans_share_out_the_time(clock: SimpleNamespace) -> None:
    found = Meter()
    inner = found.around("inner", lambda: passes(clock, 2.0))

    def outer() -> str:
        passes(clock, 1.0)
        inner()
        inner()
        passes(clock, 4.0)
        return "done"

    assert found.around("outer", outer)() == "done"
    assert found.seconds == {"inner": 4.0, "outer": 5.0}


def test_an_error_ends_its_span(clock: SimpleNamespace) -> None:
    found = Meter()

    def fail() -> None:
        passes(clock, 1.0)
        raise ValueError

    with pytest.raises(ValueError):
        found.around("outer", found.around("inner", fail))()
    assert found.seconds == {"inner": 1.0, "outer": 0.0}


async def test_an_activity_counts_only_while_it_runs(clock: SimpleNamespace) -> None:
    found = Meter()
    gate: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def activity() -> int:
        passes(clock, 1.0)
        value = await gate
        passes(clock, 2.0)
        return value

    task = asyncio.ensure_future(found.drive("activity", activity()))
    await asyncio.sleep(0)
    passes(clock, 100.0)
    gate.set_result(7)
    assert await task == 7
    assert found.seconds == {"activity": 3.0}


async def test_an_activity_can_be_cancelled(clock: SimpleNamespace) -> None:
    found = Meter()
    ended = []

    async def activity() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    task = asyncio.ensure_future(found.drive("activity", activity()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]


# ---- formulas


def test_the_null_step_is_taken_apart() -> None:
    reading = null_steps.Window(at=10.0, steps=100, loop=1.0, device=2.0, stages=1.5, null=0.5, spans={})
    later = reading._replace(at=10.2, steps=300, loop=1.1, device=2.16, stages=1.6, null=0.56)
    found = null_steps.figures_of(reading, later)
    assert found == pytest.approx({"steps_per_s": 1000, "us_per_step": 1000, "us_null": 300, "us_without_null": 700,
                                   "us_cpu": 1000})
    spans = {"hops": 0.02, "scheduling": 0.04, "hand_over": 0.01, "front": 0.03}
    found = null_steps.figures_of(reading, later._replace(spans=spans))
    assert found == pytest.approx({"us_hollow": 1000, "us_hops": 100, "us_scheduling": 200, "us_hand_over": 350,
                                   "us_stages": 500, "us_front": 150, "us_rest": -300, "us_without_front": 850})


def test_the_share_lies_between_two_commits() -> None:
    begin = share.Commits(10, 100.0, {"load": 5.0, "execute": 1.0})
    end = share.Commits(210, 104.0, {"load": 5.0, "execute": 4.4, "verify": 0.4})
    assert share.figures_of(begin, end) == pytest.approx(
        {"runtime_share": 0.05, "step_ms": 20.0, "device_ms": 19.0, "execute_ms": 17.0, "verify_ms": 2.0})


def test_prompts_of_the_share_are_repeated_for_larger_batches() -> None:
    work = share.Work("standard", (), Workloads(C=[[[1]], [[2], [3]]]), (3,), 10, 1)
    assert work.prompts(3, run=1) == [[2], [3], [2]]


# ---- the command line


@pytest.mark.parametrize(("arguments", "reason"), [
    (["--null", "--model", "x"], "--model does not go with --null"),
    (["--null", "--in-process"], "--in-process does not go with --null"),
    (["--batch", "1"], "--batch does not go with --workload"),
    (["--share", "--delivery", "zmq"], "--delivery does not go with --share"),
    (["--share", "--address", "ipc:///x"], "--address does not go with --share"),
    (["--address", "ipc:///x", "--dtype", "float32"], "--address measures a server that runs already"),
    (["--null", "--share"], "not allowed with argument"),
    (["--null", "--plot", "x.png"], "--plot does not go with --null"),
    (["--memory", "--batch", "1"], "--batch does not go with --memory"),
    (["--requests", "1"], "--requests does not go with --workload"),
    (["--plot", "x.gif"], "write a file name that ends in .png or .svg"),
    (["--in-process", "--address", "ipc:///x"], "not allowed with argument"),
    (["--workload", "AXE"], "write each workload once, of ABCDE"),
    (["--workload", "AA"], "write each workload once"),
    (["--null", "--batch", "1,0"], "write a whole number from 1"),
    (["--null", "--delivery", "pigeon"], "write zmq, direct"),
    (["--runs", "-1"], "write a whole number from 1"),
    (["--workloads", "/nonexistent.json"], "/nonexistent.json: No such file or directory"),
])
def test_mistakes_of_the_command_line(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert reason in captured.err
    assert captured.out == ""


def test_help_names_every_metric(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    assert [m for m in ("A ttft_ms", "A decode_tok_s", "B prefill_tok_s", "C wall_s", "C out_tok_s",
                        "D wall_s cold-prefix", "D wall_s warm-prefix", "D ttft_ms", "E tok_s", "us_hollow",
                        "runtime_share", "waste_pct", "at_once_ratio")
            if m not in out] == []
