"""Broken deployments: each mistake is named by file and key, with what was found and what would be accepted."""

from pathlib import Path

import pytest

from antiphon.runtime.check import examine
from antiphon.runtime.errors import ConfigError

FILE = "broken.toml"
WORKING = """
extends = "standard"
[actors.executor]
plugin = "null"
[actors.tokenizer]
plugin = "bytes"
"""
PLUGINS = """
from antiphon.actors.drafter import Drafter
from antiphon.actors.allocator import Cache
from antiphon.runtime.plugin import Options

class Fine(Drafter[Options]):
    pass

class Hungry(Drafter[Options]):
    needs = frozenset({"hidden:5"})

class OnDevice(Drafter[Options]):
    where = frozenset({"device"})

class Headed(Drafter[Options]):
    requires = ("head",)

class Old(Drafter[Options]):
    api = 0

class NoDrafter(Cache[Options]):
    pass

class NoPlugin:
    pass
"""

NEED_KEYS = ("binds beyond this machine need keys, which this version does not have; "
             "use tcp://127.0.0.1:PORT or ipc://PATH")
TWO_TOKENIZERS = """
[actors]
gateway = { uses = ["tokenizer", "two"] }
two = { kind = "tokenizer", plugin = "bytes", uses = ["scheduler"] }
"""
Case = tuple[str, str, str, str]  # config after WORKING, key, found, accepted

WORDS: list[Case] = [
    ("[modle]\npath = 'x'", "modle", "unknown table or key 'modle'",
     "Did you mean 'model'? Accepted: schema, delivery, extends, actors, cells, supervision, log, deadlines, model"),
    ("[actors.verifier]\nplugn = 'greedy'", "actors.verifier.plugn", "unknown key 'plugn'",
     "Did you mean 'plugin'? Accepted: kind, plugin, options, uses, cell, on_failure"),
    ("[actors.verifier]\nplugin = 'coupld'", "actors.verifier.plugin", "no acceptance plugin named 'coupld'",
     "Did you mean 'coupled'? Installed: coupled, greedy"),
    ("[actors.verifier]\nkind = 'verifer'", "actors.verifier.kind", "no actor kind 'verifer'",
     "Did you mean 'verifier'?"),
    ("[actors.critic]\nplugin = 'plain'", "actors.critic", "no actor kind 'critic'", "Accepted: allocator, drafter"),
    ("[actors]\n'my drafter' = { kind = 'drafter', plugin = 'plain' }", 'actors."my drafter"', "the name 'my drafter'",
     "Write a letter, then letters, digits"),
    ("[actors.pager]\ncell = 'root'", "actors.pager.cell", "the name 'root'", "not root"),
    ("[actors.pager]\non_failure = 'retry'", "actors.pager.on_failure", 'found "retry" (a string)',
     'Write one of "restart", "degrade"'),
    ("[actors.pager]\nuses = 'allocator'", "actors.pager.uses", 'found "allocator" (a string)',
     "Write a list, each a string"),
]
OPTIONS: list[Case] = [
    ("[actors.allocator]\nplugin = 'hash'\noptions = { preemption = 'swap' }", "actors.allocator.options.preemption",
     "found \"swap\" (a string), which needs 'tiers'", "Add a plugin that gives it; given here: prefixes"),
    ("[actors.allocator.options]\neviction = { plugin = 'lrru' }", "actors.allocator.options.eviction.plugin",
     "no eviction plugin named 'lrru'", "Did you mean 'lru'? Installed: cost, lru"),
    ("[actors.scheduler.options]\nmax_stp_tokens = 7", "actors.scheduler.options.max_stp_tokens",
     "unknown key 'max_stp_tokens'", "Did you mean 'max_step_tokens'? Accepted:"),
    ("[actors.scheduler.options]\nmax_step_tokens = 'lots'", "actors.scheduler.options.max_step_tokens",
     'found "lots" (a string)', "Write an integer"),
    ("[actors.scheduler.options]\nmax_step_tokens = true", "actors.scheduler.options.max_step_tokens",
     "found true (a boolean)", "Write an integer"),
    ("[actors.scheduler.options]\nlength = 'fixed'", "actors.scheduler.options.length", 'found "fixed" (a string)',
     'Write a table that names a length: { plugin = "NAME", ... }'),
    ("[actors.scheduler.options]\nlength = { plugin = 'goodput' }", "actors.scheduler.options.length.plugin",
     "no length plugin named 'goodput'", "Installed: fixed; or './file.py:Class'"),
    ("[actors.scheduler.options]\nlength = { plugin = 'fixed', mx = 3 }", "actors.scheduler.options.length.mx",
     "unknown key 'mx'", "Accepted:"),
    ("[actors.pager.options]\nsince = 2020-01-01", "actors.pager.options.since", "found 2020-01-01", "Write a string"),
    ("[model]\ndtype = 'int4'", "model.dtype", 'found "int4" (a string)', 'Write one of "auto", "float32"'),
    ("[model]\npth = 'x'", "model.pth", "unknown key 'pth'", "Did you mean 'path'?"),
    ("[supervision]\nwithin = 'soon'", "supervision.within", 'found "soon" (a string)',
     'Write a duration such as "250ms", "60s" or "5m"'),
    ("[deadlines]\nstart = 300", "deadlines.start", "found 300 (an integer)", "Write a duration"),
    ("[log]\nlevel = 'loud'", "log.level", 'found "loud" (a string)', 'Write one of "debug"'),
    ("[log]\ncolour = true", "log.colour", "unknown key 'colour'", "Accepted: level, format, prompts"),
]
EDGES: list[Case] = [
    ("[actors.gateway]\nuses = ['tokeniser']", "actors.gateway.uses[0]", "no actor named 'tokeniser'",
     "Did you mean 'tokenizer'? Declare [actors.tokeniser] or use one of:"),
    ("[actors.gateway]\nuses = ['tokenizer', 'gateway']", "actors.gateway.uses[1]", "'gateway' uses itself",
     "Accepted: tokenizer, scheduler"),
    ("[actors.drafter]\nuses = ['pager']", "actors.drafter.uses",
     "'pager' is a pager, which a drafter does not use", "Accepted kinds: none"),
    (TWO_TOKENIZERS, "actors.gateway.uses[1]", "a second tokenizer: 'tokenizer' and 'two'", "leave one of them out"),
    ("[actors.scheduler]\nuses = ['allocator', 'pager', 'drafter', 'executor']", "actors.scheduler.uses",
     "a scheduler needs an edge to a verifier", "Add one of: verifier"),
]
CELLS: list[Case] = [
    ("[cells.stpe]", "cells.stpe", "no actor is placed in this cell", "Did you mean 'step'? Cells in use: front, step"),
    ("[cells.step]\nreplicas = 2", "cells.step.replicas", "found 2 (an integer)",
     "Write 1: replicas are not built yet"),
    ("[cells.step]\nhost = 'gpu7'", "cells.step.host", 'found "gpu7" (a string)', 'Write "local"'),
    ("[cells.step]\nlisten = 'tcp://10.0.0.1:99'", "cells.step.listen", "found", NEED_KEYS),
    ("[actors.gateway.options]\nlisten = 'tcp://0.0.0.0:5777'", "actors.gateway.options.listen",
     'found "tcp://0.0.0.0:5777" (a string)', NEED_KEYS),
    ("[actors.gateway.options]\nlisten = 'tcp://*:5777'", "actors.gateway.options.listen", "found",
     NEED_KEYS),
    ("[actors.allocator]\non_failure = 'degrade'", "actors.allocator.on_failure",
     'found "degrade", but an allocator has no plain stand-in', 'Write "restart"'),
]
FILES: list[Case] = [
    ("[actors.drafter]\nplugin = './plugins.py:Hungry'", "actors.drafter.plugin",
     "drafter './plugins.py:Hungry' needs 'hidden:5', which nothing in this graph gives", "Add a plugin that gives it"),
    ("[actors.drafter]\nplugin = './plugins.py:OnDevice'\ncell = 'far'", "actors.drafter.cell",
     "it is in cell 'far', and 'device' comes from executor in cell 'step'", 'Write cell = "step"'),
    ("[actors.drafter]\nplugin = './plugins.py:Headed'", "actors.drafter.plugin",
     "drafter './plugins.py:Headed' requires 'head', which nothing in this graph provides",
     "Add an actor that provides 'head' to cell 'step'"),
    ("[actors.drafter]\nplugin = './plugins.py:Old'", "actors.drafter.plugin", "was written for drafter api 0",
     "Installed: plain"),
    ("[actors.drafter]\nplugin = './plugins.py:NoDrafter'", "actors.drafter.plugin", "is a cache, not a drafter",
     "Installed: plain"),
    ("[actors.drafter]\nplugin = './plugins.py:NoPlugin'", "actors.drafter.plugin", "not a subclass of Plugin",
     "Installed: plain"),
    ("[actors.drafter]\nplugin = './plugins.py:Gone'", "actors.drafter.plugin", "has no 'Gone'", "Installed: plain"),
    ("[actors.drafter]\nplugin = './gone.py:Mine'", "actors.drafter.plugin", "there is no file", "Installed: plain"),
    ("[actors.drafter]\nplugin = './bad.py:Mine'", "actors.drafter.plugin", "does not load: NameError",
     "Installed: plain"),
    ("[actors.drafter]\nplugin = 'my.module:Mine'", "actors.drafter.plugin", "write an installed plugin's name",
     "or './file.py:Class'"),
]
CASES = [*WORDS, *OPTIONS, *EDGES, *CELLS, *FILES]


def problems(path: str | Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        examine(path, overrides)
    return [str(p) for p in error.value.problems]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plugins.py").write_text(PLUGINS)
    (tmp_path / "bad.py").write_text("undefined")
    return tmp_path


def write(folder: Path, text: str) -> Path:
    """A config with ``text`` merged into the working one, as a file that extends it."""
    (folder / "working.toml").write_text(WORKING)
    (folder / FILE).write_text(f'extends = "./working.toml"\n{text}')
    return Path(FILE)


def test_the_working_config_works(folder: Path) -> None:
    examine(write(folder, ""))


@pytest.mark.parametrize(("text", "key", "found", "accepted"), CASES, ids=[case[1] for case in CASES])
def test_one_mistake_is_one_message_with_file_key_found_and_accepted(
    folder: Path, text: str, key: str, found: str, accepted: str,
) -> None:
    (message,) = problems(write(folder, text))
    assert message.startswith(f"{FILE}: {key}: ")
    assert found in message
    assert accepted in message


@pytest.mark.parametrize(("text", "message"), [
    ("schema = 2", f"{FILE}: schema: found 2 (an integer). Write 1"),
    ("delivery = 'pigeon'", f'{FILE}: delivery: found "pigeon" (a string). Write one of "zmq", "direct"'),
    ("extends = 5", f"{FILE}: extends: found 5 (an integer). Write a preset's name or './file.toml'"),
    ("extends = 'speculative'",
     f"{FILE}: extends: no preset named 'speculative'. Installed presets: offload, standard; or './file.toml'"),
    ("extends = './gone.toml'", f"{FILE}: extends: cannot read "),
    ("actors = 5", f"{FILE}: actors: found 5 (an integer). Write a table [actors]"),
    ("", f"{FILE}: actors: no actor is declared. Declare [actors.NAME] or extend a preset: offload, standard"),
    ("[actors.gateway", f"{FILE}: is no TOML: "),
])
def test_a_mistake_at_the_top_of_a_file(folder: Path, text: str, message: str) -> None:
    (folder / FILE).write_text(text)
    assert problems(FILE)[0].startswith(message)


def test_a_file_that_cannot_be_extended_is_the_only_problem_told(folder: Path) -> None:
    (folder / FILE).write_text("extends = 'disaggregated'\n[actors.gateway]\nuses = ['tokenizer']\n[modle]")
    (message,) = problems(FILE, "actors.pager.plugin=tiered")
    assert "no preset named 'disaggregated'" in message


def test_files_that_cannot_be_read(folder: Path) -> None:
    (message,) = problems("gone.toml")
    assert message == (f"gone.toml: cannot read {folder / 'gone.toml'}: No such file or directory. "
                       "Write the path of a TOML file or a preset's name; installed: offload, standard")
    (folder / "folder.toml").mkdir()
    assert "Is a directory" in problems("folder.toml")[0]
    (folder / "latin.toml").write_bytes(b"x = '\xe9'")
    assert "is no TOML: 'utf-8' codec can't decode" in problems("latin.toml")[0]
    assert problems("standart")[0].startswith("standart: no preset named 'standart'. Did you mean 'standard'?")


def test_files_that_extend_each_other(folder: Path) -> None:
    (folder / "a.toml").write_text("extends = './b.toml'")
    (folder / "b.toml").write_text("extends = './a.toml'")
    assert problems("a.toml")[0] == ("b.toml: extends: goes round in a circle: a.toml -> b.toml -> a.toml. "
                                     "A file may not extend itself, not even through others")


def test_actors_that_wait_for_each_other(folder: Path) -> None:
    kind, circle = problems(write(folder, "[actors.verifier]\nuses = ['tokenizer']"))
    assert kind.endswith("'tokenizer' is a tokenizer, which a verifier does not use. Accepted kinds: none")
    assert circle == (f"{FILE}: actors.verifier.uses: actors wait for each other in a circle: "
                      "verifier -> tokenizer -> scheduler -> verifier. Remove one of these edges")


def test_a_plugin_that_is_not_named(folder: Path) -> None:
    (folder / FILE).write_text("[actors.allocator]\n[actors.allocator.options]\nblocks = 3")
    missing, edge = problems(FILE)
    assert "an allocator needs an edge to a pager" in edge
    assert missing == f"{FILE}: actors.allocator.plugin: is missing. Name a cache; installed: hash, plain, radix"


def test_overrides_are_named_as_such(folder: Path) -> None:
    path = write(folder, "")
    assert problems(path, "actors.verifer.plugin=greedy")[0].startswith(
        "--set: actors.verifer.plugin: no actor named 'verifer'. Did you mean 'verifier'?")
    assert problems(path, "actors.verifier.plugin=greedi")[0].startswith(
        "--set: actors.verifier.plugin: no acceptance plugin named 'greedi'. Did you mean 'greedy'?")
    assert problems(path, "actors.gateway.options.listen=tcp://0.0.0.0:1")[0].startswith(
        '--set: actors.gateway.options.listen: found "tcp://0.0.0.0:1"')


def test_a_mistake_in_an_extended_file_names_that_file(folder: Path) -> None:
    (folder / "low.toml").write_text(WORKING + "[actors.verifier]\nplugin = 'coupld'")
    (folder / FILE).write_text("extends = './low.toml'")
    assert problems(FILE)[0].startswith("low.toml: actors.verifier.plugin: no acceptance plugin named 'coupld'")


def test_all_mistakes_are_told_at_once(folder: Path) -> None:
    parts = ["[actors.pager]\nplugin = 'plian'", "[actors.verifier]\nplugn = 'x'", "[log]\nlevel = 'loud'",
             "[actors.gateway]\nuses = ['tokeniser']", "[cells.stpe]", "[actors.drafter]\nplugin = './gone.py:X'"]
    found = problems(write(folder, "\n".join(parts)))
    for key in ("actors.pager.plugin", "actors.verifier.plugn", "log.level", "actors.gateway.uses[0]", "cells.stpe",
                "actors.drafter.plugin"):
        assert any(p.startswith(f"{FILE}: {key}: ") for p in found), key
