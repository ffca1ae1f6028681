"""``antiphon bench`` on the null backend: that it measures and what it prints, not how fast anything is."""

import json
import tempfile
from pathlib import Path

import pytest
from tests.harness import DELIVERIES, NULL, Server

from antiphon.__main__ import main
from antiphon.plugins.bench.null_steps import Work, null_steps

PROMPTS = {
    "A": [[1, 2, 3], [4, 5, 6]], "B": [[1] * 40, [2] * 40], "C": [[[1, 2], [3, 4]], [[5, 6], [7, 8]]],
    "D": [{"cold": [[1, 2, 3], [1, 2, 4]], "warm": [[1, 2, 5], [1, 2, 6]]}], "E": [5, 6, 7],
}
METRICS = ["A ttft_ms", "A decode_tok_s", "B prefill_tok_s", "C wall_s", "C out_tok_s", "D wall_s cold-prefix",
           "D ttft_ms cold-prefix", "D wall_s warm-prefix", "D ttft_ms warm-prefix", "E tok_s"]
SETTINGS = [part for setting in NULL for part in ("--set", setting)]


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of prompts that the null backend takes; what the bench puts into the temporary directory can be seen."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(PROMPTS))
    return path


def left_behind(prompts: Path) -> list[str]:
    return [path.name for path in (prompts.parent / "tmp").iterdir()]


def rows(capfd: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capfd.readouterr().out.splitlines()]


def test_workloads_through_the_door_of_a_deployment_of_its_own(
    prompts: Path, capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "--workload", "ABCDE", "--runs", "2", "--json", "--workloads", str(prompts), *SETTINGS]) == 0
    found = rows(capfd)
    assert [row["metric"] for row in found] == METRICS
    for row in found:
        assert set(row) == {"metric", "median", "min", "max", "n", "door", "command"}
        assert 0 < row["min"] <= row["median"] <= row["max"]  # type: ignore[operator]
        assert (row["n"], row["door"]) == (2, "zmq")
        assert str(row["command"]).startswith("antiphon bench --workload ABCDE --runs 2 --workloads ")
    assert left_behind(prompts) == []


def test_workloads_in_this_process(prompts: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--workload", "ca", "--runs", "1", "--in-process", "--workloads", str(prompts), *SETTINGS]
    assert main(["bench", *arguments, "--json"]) == 0
    assert [(row["metric"], row["door"]) for row in rows(capfd)] == [
        (metric, "in-process") for metric in ("C wall_s", "C out_tok_s", "A ttft_ms", "A decode_tok_s")]
    assert main(["bench", *arguments]) == 0
    captured = capfd.readouterr()
    title, header, *table = captured.out.splitlines()
    assert title.startswith("# antiphon bench --workload CA --runs 1 ")
    assert header.split() == ["median", "min", "max", "n"]
    assert [line.rsplit(maxsplit=4)[0] for line in table] == ["C wall_s", "C out_tok_s", "A ttft_ms", "A decode_tok_s"]
    assert "bench: warming up" in captured.err
    assert left_behind(prompts) == []


def test_workloads_at_a_server_that_runs(
    prompts: Path, tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str],
) -> None:
    with Server(tmp_path_factory.mktemp("s")) as server:
        arguments = ["--workload", "A", "--runs", "1", "--json", "--workloads", str(prompts)]
        assert main(["bench", *arguments, "--address", server.address]) == 0
        assert [row["metric"] for row in rows(capfd)] == METRICS[:2]
        assert server.stop() == 0


def test_prompts_beyond_the_vocabulary_are_an_error_that_says_what_to_set(
    prompts: Path, capfd: pytest.CaptureFixture[str],
) -> None:
    prompts.write_text(json.dumps({"A": [[1, 2, 3], [900, 5, 6]]}))
    arguments = ["--workload", "A", "--runs", "1", "--in-process", "--json", "--workloads", str(prompts), *SETTINGS]
    assert main(["bench", *arguments]) == 1
    err = capfd.readouterr().err
    assert "a prompt was refused: invalid: token ids" in err
    assert "these prompts have ids up to 900: serve a model that has them, or bring others with --workloads" in err
    assert "actors.executor.options.vocabulary" in err
    more = ["--set", "actors.executor.options.vocabulary=1000", "--set", "actors.tokenizer.options.size=1000"]
    assert main(["bench", *arguments, *more]) == 0
    assert [row["metric"] for row in rows(capfd)] == METRICS[:2]


def test_a_config_that_cannot_run_is_explained(prompts: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wrong = ["--set", "actors.verifier.plugin=coupld"]
    assert main(["bench", "--workload", "A", "--workloads", str(prompts), *SETTINGS, *wrong]) == 2
    err = capfd.readouterr().err
    assert "Did you mean 'coupled'?" in err
    assert "the deployment ended with exit code 2; its messages stand above" in err
    assert left_behind(prompts) == []


def test_the_null_step_is_taken_apart_under_both_deliveries(prompts: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--null", "--batch", "1,3", "--steps", "10", "--runs", "2", "--json"]) == 0
    found = rows(capfd)
    whole = ["steps_per_s", "us_per_step", "us_null", "us_without_null", "us_cpu"]
    parts = ["us_hollow", "us_hops", "us_scheduling", "us_hand_over", "us_stages", "us_front", "us_rest",
             "us_without_front"]
    assert [row["metric"] for row in found] == [
        f"null {delivery} {batch} {name}" for delivery in DELIVERIES for batch in (1, 3) for name in whole + parts]
    values = {row["metric"]: row for row in found}
    assert all(row["n"] == 2 for row in found)
    for delivery in DELIVERIES:
        for batch in (1, 3):
            group = f"null {delivery} {batch}"
            row = values[f"{group} us_hollow"]
            assert (row["delivery"], row["batch"]) == (delivery, batch)
            # The meter found everything it looks for: a part that was renamed would be counted as another.
            assert all(values[f"{group} {name}"]["min"] > 0 for name in whole[:3] + parts[:6])  # type: ignore[operator]
    assert values["null direct 1 us_hops"]["median"] < values["null zmq 1 us_hops"]["median"]  # type: ignore[operator]
    assert left_behind(prompts) == []


def test_the_share_of_the_runtime_and_the_stages_alone(prompts: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--batch", "1,3", "--steps", "20", "--runs", "1", "--json", "--workloads", str(prompts)]
    assert main(["bench", "--share", *arguments, *SETTINGS]) == 0
    found = rows(capfd)
    names = ["runtime_share", "step_ms", "device_ms", "execute_ms", "verify_ms", "alone_ms", "alone_execute_ms",
             "alone_verify_ms"]
    assert [row["metric"] for row in found] == [f"share {batch} {name}" for batch in (1, 3) for name in names]
    values = {str(row["metric"]): float(row["median"]) for row in found}  # type: ignore[arg-type]
    for batch in (1, 3):
        assert 0 < values[f"share {batch} runtime_share"] < 1
        assert values[f"share {batch} device_ms"] == pytest.approx(
            values[f"share {batch} execute_ms"] + values[f"share {batch} verify_ms"], rel=1e-3)
    assert "--dtype bfloat16" in str(found[0]["command"])
    assert left_behind(prompts) == []


def test_paged_memory_is_used_and_holds_more_sequences(prompts: Path, capfd: pytest.CaptureFixture[str]) -> None:
    picture = prompts.with_name("map.png")
    assert main(["bench", "--requests", "64", "--plot", str(picture), "--json"]) == 0
    found = rows(capfd)
    names = ["waste_pct", "waste_pct_window", "at_once", "at_once_peak", "at_once_ratio"]
    assert [row["metric"] for row in found] == [
        f"memory {kind} {name}" for kind in ("paged", "whole") for name in names]
    values = {str(row["metric"]): float(row["median"]) for row in found}  # type: ignore[arg-type]
    assert 0 < values["memory paged waste_pct"] < 4 < values["memory whole waste_pct"]
    assert values["memory whole at_once_peak"] == 8
    assert values["memory paged at_once_ratio"] > 2
    assert str(found[0]["command"]).startswith("antiphon bench --memory --runs 1 --requests 64 --plot ")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert left_behind(prompts) == []


def test_unlike_amounts_of_memory_are_not_compared(prompts: Path, capfd: pytest.CaptureFixture[str]) -> None:
    blocks = ["--set", "actors.allocator.options.blocks=300"]
    assert main(["bench", "--memory", "--requests", "4", *blocks]) == 2
    assert "set actors.allocator.options.memory, not blocks" in capfd.readouterr().err
    assert left_behind(prompts) == []


@pytest.mark.bench
def test_a_null_step_of_32_streams_costs_less_than_300_microseconds_under_direct_delivery() -> None:
    """Alone on the machine: ``pytest -m bench tests/behaviour/test_bench_command.py``."""
    figures = null_steps(Work("standard", (), (32,), ("direct",), 200, 5), lambda _: None)
    assert figures.median("null direct 32 us_hollow") < 300


@pytest.mark.bench
@pytest.mark.timeout(900)
def test_the_runtime_takes_less_than_a_twentieth_of_a_real_step(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--share", "--json"]) == 0
    values = {str(row["metric"]): float(row["median"]) for row in rows(capfd)}  # type: ignore[arg-type]
    assert values["share 1 runtime_share"] < 0.05
    assert values["share 32 runtime_share"] < 0.05
