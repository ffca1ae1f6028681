"""The verbs that look without starting anything: check, graph, plugins, models, and the command line around them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from antiphon.__main__ import main

NULL = ["--set", "actors.executor.plugin=null", "--set", "actors.tokenizer.plugin=bytes"]


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    path = tmp_path / "broken.toml"
    path.write_text('extends = "standard"\n[actors.verifier]\nplugin = "coupld"\n[log]\nlevel = "loud"')
    return path


# ---- check


def test_check_of_a_deployment_that_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *NULL]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "ok: preset standard"
    assert out[1].startswith("cell step: ")
    assert out[2] == "cell front: tokenizer, gateway"


def test_check_says_what_edges_cost_that_leave_their_cell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *NULL, "--set", "actors.verifier.cell=verify", "--set", "actors.drafter.cell=draft"]) == 0
    out = capsys.readouterr().out
    assert "cell verify: verifier" in out
    assert "note: scheduler -> verifier: leaves cell step for verify: per verified row" in out
    assert "note: scheduler -> drafter: leaves cell step for draft: per sequence and step" in out


def test_check_of_a_broken_deployment(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(broken), *NULL]) == 2
    captured = capsys.readouterr()
    first, second = captured.out.splitlines()
    assert first == f'{broken}: log.level: found "loud" (a string). Write one of "debug", "info", "warning", "error"'
    assert second == (f"{broken}: actors.verifier.plugin: no acceptance plugin named 'coupld'. Did you mean 'coupled'? "
                      "Installed: coupled, greedy; or './file.py:Class'")
    assert captured.err == "2 problems\n"


def test_check_speaks_json(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *NULL, "--json"]) == 0
    good = json.loads(capsys.readouterr().out)
    assert good["ok"] is True
    assert good["cells"]["front"] == ["tokenizer", "gateway"]
    assert main(["check", str(broken), *NULL, "--json"]) == 2
    bad = json.loads(capsys.readouterr().out)
    assert bad["ok"] is False
    assert [p["key"] for p in bad["problems"]] == ["log.level", "actors.verifier.plugin"]
    assert set(bad["problems"][0]) == {"file", "key", "found", "remedy"}


# ---- graph


def test_graph_draws_what_the_config_expands_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", "--set", "actors.tokenizer.cell=text"]) == 0
    text = capsys.readouterr().out
    assert "preset standard, zmq delivery" in text
    assert "cell text\n  tokenizer  auto -> scheduler" in text
    assert 'listen = "tcp://127.0.0.1:5777"' in text
    assert main(["graph", "--format", "mermaid"]) == 0
    mermaid = capsys.readouterr().out
    assert mermaid.startswith("flowchart LR\n")
    assert 'actor_gateway["gateway<br/>zmq"]' in mermaid
    assert "actor_tokenizer --> actor_scheduler" in mermaid
    assert mermaid.count("subgraph") == mermaid.count("  end") == 2
    assert main(["graph", "--format", "json", "--set", "delivery=direct"]) == 0
    assert json.loads(capsys.readouterr().out)["delivery"] == "direct"


def test_graph_of_a_config_it_cannot_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", "speculative"]) == 2
    assert capsys.readouterr().err == ("speculative: no preset named 'speculative'. "
                                       "Installed presets: offload, standard; or './file.toml'\n")


# ---- plugins and models


def test_plugins_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "list", "acceptance"]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["acceptance", "coupled"], ["acceptance", "greedy"]]
    assert main(["plugins", "list", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"kind": "drafter", "name": "plain", "package": lines[0]["package"],
            "object": "antiphon.plugins.drafters.plain:Plain"} in lines
    assert main(["plugins", "list", "acceptanc"]) == 2
    assert "Did you mean 'acceptance'?" in capsys.readouterr().err


def test_plugins_show(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["plugins", "show", "plain", "--kind", "drafter"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("drafter plain  (antiphon ")
    assert "plugins/drafters/plain.py" in text
    assert "where: host" in text
    assert main(["plugins", "show", "scheduler", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    option = {"name": "max_step_tokens", "type": "an integer >= 1", "required": False, "default": 2048}
    assert option in shown["options"]
    assert shown["uses"] == ["allocator", "pager", "drafter", "executor", "verifier"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from antiphon.actors.drafter import Drafter\nfrom antiphon.runtime.plugin import Options\n"
        "class O(Options):\n    n: int\nclass Mine(Drafter[O]):\n    'Guesses.'\n")
    assert main(["plugins", "show", "./mine.py:Mine", "--kind", "drafter"]) == 0
    assert "n  an integer; required" in capsys.readouterr().out
    assert main(["plugins", "show", "./mine.py:Mine"]) == 2
    assert main(["plugins", "show", "plian"]) == 2
    assert "Did you mean 'plain'?" in capsys.readouterr().err


def test_models_lists_the_catalogue(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path))
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert "smollm2-135m-instruct" in out
    assert "not fetched: antiphon models pull smollm2-135m-instruct" in out
    assert main(["models", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["path"] is None
    assert main(["models", "pull", "smolm2"]) == 2
    assert "Accepted: " in capsys.readouterr().err


# ---- the command line itself


def test_help_names_every_command_and_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "  check     explain every mistake in a deployment's config" in out
    for name in ("bench", "cache", "generate", "graph", "models", "plugins", "serve"):
        assert f"\n  {name}" in out
    assert main(["check", "--help"]) == 0
    assert "--set A.B.C=VALUE" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("antiphon ")


def test_a_mistyped_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["chek"]) == 2
    assert "no command 'chek'. Did you mean 'check'?" in capsys.readouterr().err
    assert main(["--loud"]) == 2
    assert main(["graph", "--format", "svg"]) == 2
    assert "invalid choice: 'svg'" in capsys.readouterr().err


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    from antiphon.plugins.commands.graph import Graph

    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(Graph, "run", interrupted)
    assert main(["graph"]) == 130


def test_a_reader_that_leaves_is_no_error() -> None:
    """The pipe is closed before anything is written, so that the outcome does not depend on timing."""
    program = "import sys; sys.stdin.read(); from antiphon.__main__ import main; sys.exit(main(['plugins', 'list']))"
    with subprocess.Popen([sys.executable, "-P", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        _, err = process.communicate(timeout=60)
    assert process.returncode == 141
    assert err == b""


def test_looking_at_commands_imports_no_heavy_library() -> None:
    program = ("import contextlib, io, sys\nfrom antiphon.__main__ import main\n"
               "with contextlib.redirect_stdout(io.StringIO()):\n    main(['plugins', 'list']); main(['--help'])\n"
               "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
