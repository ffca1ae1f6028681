"""Broken tiers: each mistake is named by file and key before anything starts."""

import os
from pathlib import Path

import pytest

from antiphon.runtime.check import examine
from antiphon.runtime.errors import ConfigError

CONFIG = """
extends = "standard"
[actors.executor]
plugin = "null"
[actors.tokenizer]
plugin = "bytes"
[actors.pager]
plugin = "tiered"
options = { %s }
"""
KEY = "actors.pager.options"
CASES = [
    ("", f"{KEY}.tiers: is missing. Write a list, each a table"),
    ("tiers = []", f"{KEY}.tiers: found [] (a list). Write a list, each a table length >= 1"),
    ("tiers = 'ram'", f'{KEY}.tiers: found "ram" (a string). Write a list'),
    ("tiers = ['ram']", f"{KEY}.tiers[0]: found"),
    ("tiers = [{ size = '1GiB' }]", f"{KEY}.tiers[0]: found"),
    ("tiers = [{ plugin = 'rom', size = '1GiB' }]",
     f"{KEY}.tiers[0].plugin: no tier plugin named 'rom'. Did you mean 'ram'? Installed: disk, ram, redis, throttled"),
    ("tiers = [{ plugin = 'ram' }]", f'{KEY}.tiers[0].size: is missing. Write a size such as "512MiB" or "4GiB"'),
    ("tiers = [{ plugin = 'ram', size = 'big' }]",
     f'{KEY}.tiers[0].size: found "big" (a string). Write a size such as "512MiB" or "4GiB"'),
    ("tiers = [{ plugin = 'ram', size = 0 }]", f"{KEY}.tiers[0]: size is 0, so nothing could be kept"),
    ("tiers = [{ plugin = 'ram', size = '1GiB', write = 'both' }]",
     f'{KEY}.tiers[0].write: found "both" (a string). Write one of "back", "through"'),
    ("tiers = [{ plugin = 'ram', size = '1GiB', ttl = '1s' }]", f"{KEY}.tiers[0].ttl: unknown key 'ttl'"),
    ("tiers = [{ plugin = 'ram', size = '1GiB' }, { plugin = 'disk', size = '1GiB' }]",
     f"{KEY}.tiers[1].path: is missing. Write a string"),
    ("tiers = [{ plugin = 'disk', path = './taken/kv', size = '1GiB' }]",
     f"{KEY}.tiers[0]: path './taken/kv': HERE/taken is no directory"),
    ("tiers = [{ plugin = 'disk', path = './closed/kv', size = '1GiB' }]",
     f"{KEY}.tiers[0]: path './closed/kv': HERE/closed is not writable for this user"),
    ("tiers = [{ plugin = 'disk', path = './kv', size = '1GiB' }, { plugin = 'disk', path = 'kv', size = '1GiB' }]",
     f"{KEY}: tiers 0 and 1 have the same path: give each a directory of its own"),
    ("tiers = [{ plugin = 'redis', url = 'http://127.0.0.1' }]", f"{KEY}.tiers[0]: url must be redis://HOST:PORT/NUMBER"),
    ("tiers = [{ plugin = 'redis', url = 'redis://' }]", f"{KEY}.tiers[0]: url must be redis://HOST:PORT/NUMBER"),
    ("tiers = [{ plugin = 'redis', timeout = 1 }]", f"{KEY}.tiers[0].timeout: found 1 (an integer). Write a duration"),
    ("tiers = [{ plugin = 'throttled', bandwidth = 'slow', tier = { plugin = 'ram', size = '1GiB' } }]",
     f"{KEY}.tiers[0]: 'slow' is no size"),
    ("tiers = [{ plugin = 'throttled', tier = { plugin = 'ram', size = '1GiB', write = 'back' } }]",
     f"{KEY}.tiers[0]: write of a wrapped tier is not read: write it beside 'tier'"),
    ("tiers = [{ plugin = 'throttled', tier = { plugin = 'rom' } }]",
     f"{KEY}.tiers[0].tier.plugin: no tier plugin named 'rom'"),
    ("tiers = [{ plugin = 'ram', size = '1GiB' }], look = 1", f"{KEY}.look: found 1 (an integer). Write a duration"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")
    (tmp_path / "closed").mkdir(mode=0o500)
    real = os.access  # root may write everywhere: what a user is told is asked of the mode
    monkeypatch.setattr("os.access", lambda p, mode: Path(p).name != "closed" and real(p, mode))
    return tmp_path


def problems(folder: Path, options: str) -> list[str]:
    """What is wrong with the pager."""
    (folder / "broken.toml").write_text(CONFIG % options)
    try:
        examine("broken.toml")
    except ConfigError as error:
        # An executor that gives no access to its blocks is another mistake.
        return [str(p) for p in error.problems if "'blocks'" not in str(p)]
    return []


@pytest.mark.parametrize(("options", "message"), CASES, ids=[case[1].split(": ")[1][:40] for case in CASES])
def test_one_mistake_is_one_message(folder: Path, options: str, message: str) -> None:
    (found,) = problems(folder, options)
    assert found.startswith("broken.toml: " + message.replace("HERE", str(folder)))


def test_working_tiers_work_and_nothing_is_made_by_looking(folder: Path) -> None:
    tiers = "{ plugin = 'ram', size = '1GiB' }, { plugin = 'disk', path = './kv', size = '1GiB' }, { plugin = 'redis' }"
    assert problems(folder, f"tiers = [{tiers}]") == []
    assert not (folder / "kv").exists()
