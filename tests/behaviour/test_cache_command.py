"""``antiphon cache``: what an operator reads and does, and what a mistake is answered with."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.callers import POOL
from tests.harness import Server

from antiphon.__main__ import main
from antiphon.plugins.commands import cache
from antiphon.plugins.doors.sync import Client

PROMPT = list(range(7, 47))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    settings = ("actors.allocator.plugin='hash'", *POOL)
    with Server(tmp_path_factory.mktemp("s"), *settings) as server, server.client() as found:
        yield found


def test_pools_hits_prefixes_and_pins_are_shown(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    client.generate(PROMPT, max_tokens=4)
    client.generate(PROMPT, max_tokens=4)
    pin = client.pin(PROMPT)
    assert main(["cache", "--address", client.address]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "allocator: blocks of 16 tokens"
    assert lines[1].split() == ["pool", "total", "free", "active", "cached", "in", "transfer", "quarantined", "waste"]
    assert lines[2].split()[:2] == ["context,draft", "4096"]
    assert "hits: of 80 prompt tokens 32 found on the device (40.0 %), 0 in tiers (0.0 %)" in lines
    assert any(line.startswith("counters: queried_slots 80, hit_slots 32") for line in lines)
    assert any(line.split() == ["prefix", "tokens", "hits", "last", "used"] for line in lines)
    assert any(line.split()[:2] == [str(pin.number), "local"] for line in lines)
    assert any(line.startswith("pager: ") for line in lines)


def test_a_machine_reads_one_json_object(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "--address", client.address, "--json", "--top", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"allocators", "pagers"}
    assert set(found["allocators"]["allocator"]) == {"block_size", "pools", "counters", "prefixes", "pins"}


def test_a_prefix_is_pinned_let_go_and_flushed(
    client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "A text of several blocks, as one finds them at the beginning of many prompts."
    client.generate(text, max_tokens=2, raw=True)
    assert main(["cache", "--address", client.address, "pin", "--raw", text, "--seconds", "60", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["slots"] == 64
    (tmp_path / "prompt.txt").write_text(text)
    assert main(["cache", "--address", client.address, "pin", "--file", str(tmp_path / "prompt.txt"), "--raw"]) == 0
    assert capsys.readouterr().out == f"pin {made['pin']}: 64 tokens are kept for 3600 s\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["cache", "--address", client.address, "pin", "--file", "-", "--raw"]) == 0
    client.generate(PROMPT, max_tokens=4)
    (tmp_path / "ids.json").write_text(json.dumps(PROMPT))
    assert main(["cache", "--address", client.address, "pin", "--prompt-ids", str(tmp_path / "ids.json")]) == 0
    capsys.readouterr()
    assert main(["cache", "--address", client.address, "unpin", str(made["pin"])]) == 0
    assert capsys.readouterr().out == f"pin {made['pin']} has been let go\n"
    assert main(["cache", "--address", client.address, "unpin", str(made["pin"])]) == 1
    assert f"there is no pin {made['pin']}" in capsys.readouterr().err
    assert main(["cache", "--address", client.address, "flush"]) == 0
    assert "cached blocks forgotten" in capsys.readouterr().out


def test_a_cache_that_keeps_nothing_is_explained(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str],
) -> None:
    with Server(tmp_path_factory.mktemp("s"), "actors.allocator.plugin='plain'", *POOL) as server:
        assert main(["cache", "--address", server.address]) == 0
        assert "antiphon serve --set actors.allocator.plugin=hash" in capsys.readouterr().out
        assert main(["cache", "--address", server.address, "pin", "hello"]) == 1
        err = capsys.readouterr().err
    assert "this allocator keeps no prefixes" in err
    assert "antiphon serve --set actors.allocator.plugin=hash" in err


def test_no_server_is_told_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache, "PATIENCE", 0.2)
    assert main(["cache", "--address", f"ipc://{tmp_path}/nobody"]) == 1
    err = capsys.readouterr().err
    assert "no Antiphon server answers at" in err
    assert "start one with 'antiphon serve'" in err


@pytest.mark.parametrize(("arguments", "reason"), [
    (["fluhs"], "the actions are flush, pin TEXT and unpin NUMBER"),
    (["flush", "it"], "the actions are"),
    (["pin"], "give one prompt to pin"),
    (["pin", "two", "prompts"], "give one prompt to pin"),
    (["pin", "a", "--file", "b"], "give one prompt to pin"),
    (["pin", "--file", "/nonexistent"], "/nonexistent: "),
    (["unpin", "first"], "unpin NUMBER"),
    (["flush", "--raw"], "go with 'pin'"),
    (["--top", "many"], "invalid int value"),
])
def test_mistakes_of_the_command_line(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", *arguments]) == 2
    captured = capsys.readouterr()
    assert reason in captured.err
    assert captured.out == ""


def test_a_file_that_is_no_list_of_ids_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ids.json").write_text('{"ids": [1]}')
    assert main(["cache", "pin", "--prompt-ids", str(tmp_path / "ids.json")]) == 2
    assert "expected one JSON list of token ids" in capsys.readouterr().err


def test_tiers_are_shown_whatever_they_say() -> None:
    facts = {"copied": 3, "tiers": [
        {"tier": "ram", "state": "ok", "bytes": 3 << 20, "latency_s": 0.00012, "bytes_per_s": 5e9, "hits": 12},
        {"tier": "disk", "state": "degraded", "bytes": 0, "latency_s": 0.0, "bytes_per_s": 0.0, "cause": "gone"},
    ]}
    assert [line.split() for line in cache.pager("pager", facts)] == [
        ["pager:", "copied", "3"],
        ["tier", "state", "bytes", "hits", "latency_s", "bytes_per_s", "cause"],
        ["ram", "ok", "3.0", "MiB", "12", "0.12", "ms", "4.7", "GiB/s"],
        ["disk", "degraded", "0", "B", "0", "ms", "0", "B/s", "gone"],
    ]


def test_help_tells_every_action(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "--help"]) == 0
    out = capsys.readouterr().out
    assert [word for word in ("flush", "unpin NUMBER", "--prompt-ids FILE", "Exit codes") if word not in out] == []
