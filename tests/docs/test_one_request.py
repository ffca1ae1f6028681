"""The walk through the code names only what exists."""

import re
from importlib import import_module
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def resolve(name: str) -> object:
    """Import the longest module prefix of a dotted name and follow the rest as attributes."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: object = import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def test_every_symbol_of_the_walk_exists() -> None:
    text = (DOCS / "one-request.md").read_text()
    names = sorted(set(re.findall(r"`(antiphon\.[\w.]+)`", text)))
    assert len(names) > 30
    for name in names:
        resolve(name)


def test_every_message_of_the_walk_is_in_the_vocabulary() -> None:
    protocol = import_module("antiphon.actors.protocol")
    text = (DOCS / "one-request.md").read_text()
    for name in re.findall(r"`([A-Z][a-z]+)`", text):
        assert hasattr(protocol, name), name
