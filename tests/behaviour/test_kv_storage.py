"""How keys and values are stored is a deployment's choice: checked before it starts, shown, and worth its memory."""

from pathlib import Path

import pytest
from tests.checkpoints import tiny_llama

from antiphon.__main__ import main
from antiphon.plugins.doors.llm import LLM

KEY = "actors.executor.options"


@pytest.mark.parametrize(("settings", "told"), [
    (["quantization={plugin='int9'}"], "options.quantization.plugin: no quantization plugin named 'int9'"),
    (["quantization={plugin='int8', keys='row'}"], f"{KEY}.quantization.keys: found"),
    (["kv_dtype='int8'"], f"{KEY}.kv_dtype: found"),
    (["kv_dtype='float16'", "quantization={plugin='int8'}"], "leave `kv_dtype` out beside it"),
])
def test_what_cannot_be_is_explained(
    settings: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_llama(tmp_path / "m")
    command = ["check", "--set", f"model.path={str(path)!r}"]
    for setting in settings:
        command += ["--set", f"{KEY}.{setting}"]
    assert main(command) == 2
    assert told in capsys.readouterr().out


def test_a_lossy_plugin_is_shown_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "show", "int8"]) == 0
    assert "\n  lossy: yes\n" in capsys.readouterr().out
    assert main(["plugins", "show", "greedy"]) == 0
    assert "lossy" not in capsys.readouterr().out


def test_smaller_slots_give_more_blocks_of_the_same_memory(tmp_path: Path) -> None:
    path, prompt = tiny_llama(tmp_path / "m"), list(range(60, 100))
    blocks, ids = {}, {}
    for name, setting in {
        "float32": "kv_dtype='auto'", "float16": "kv_dtype='float16'", "int8": "quantization={plugin='int8'}",
    }.items():
        settings = [f"{KEY}.{setting}", "actors.allocator.options.memory='1MiB'"]
        with LLM(str(path), dtype="float32", settings=settings) as llm:
            ids[name] = llm.generate(prompt, max_tokens=20, ignore_eos=True).ids
            blocks[name] = llm.stats()["allocator"]["total"]
    assert {len(found) for found in ids.values()} == {20}
    assert ids["float16"][:4] == ids["float32"][:4]
    assert blocks == {
        name: [(1 << 20) // (2 * 2 * 2 * record * 16)]  # layers, K and V, heads, bytes of a head, block size
        for name, record in (("float32", 64), ("float16", 32), ("int8", 18))
    }
