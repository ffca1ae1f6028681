"""Reads a config file, what it extends and ``--set`` overrides, and merges them into one table.

It does not know what the tables mean, except that options belong to the plugin they were written for.
"""

import math
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from antiphon.runtime import plugin
from antiphon.runtime.errors import PluginError, Problem
from antiphon.runtime.plan import MAIN, actor_type
from antiphon.runtime.tables import Findings, join, shown, suggestion

Table = dict[str, Any]

SET = "--set"


class Layer(NamedTuple):
    """One file: how messages call it, where its relative names start, what it says."""

    label: str
    folder: Path
    table: Table
    path: Path | None = None


class Merged(NamedTuple):
    """All layers in one table, and by key path the label of every value that a lower or an override layer wrote.

    If it is not ``whole``, a layer could not be read and what is missing says nothing.
    """

    label: str
    folder: Path
    table: Table
    origins: dict[str, str]
    whole: bool


def names(kind: str) -> list[str]:
    """Installed names of a kind; the kind itself is not loaded."""
    return plugin.kinds().get(kind, [])


def merge(top: Layer | str, overrides: Sequence[str], accepted: Sequence[str], findings: Findings) -> Merged:
    """Merge a layer, or the file or preset of a name, over what it extends, and overrides over that."""
    layers = _stack(top, findings)
    whole = not findings.problems
    here = layers[-1] if layers else Layer(str(top), Path.cwd(), {})
    findings.file = here.label
    table: Table = {}
    origins: dict[str, str] = {}
    for layer in layers:
        _absolute(layer.table, layer.folder, here.folder)
        _merge(table, layer.table, (), "" if layer is layers[-1] else layer.label, origins)
    findings.origins = origins
    for text in overrides if whole else ():
        override = _override(text, table, accepted, findings)
        if override is not None:
            _absolute(override, Path.cwd(), here.folder)
            _merge(table, override, (), SET, origins)
    _plain(table, "", findings)
    return Merged(here.label, here.folder, table, origins, whole)


def _stack(top: Layer | str, findings: Findings) -> list[Layer]:
    """Layers from the lowest to ``top``."""
    layers: list[Layer] = []
    layer = top if isinstance(top, Layer) else _open(top, Path.cwd(), "", "", findings)
    while layer is not None:
        layers.insert(0, layer)
        extends = layer.table.pop("extends", None)
        if extends is None:
            break
        if not isinstance(extends, str):
            findings.problems.append(Problem(layer.label, "extends", f"found {shown(extends)}",
                                             "Write a preset's name or './file.toml'"))
            break
        below = _open(extends, layer.folder, layer.label, "extends", findings)
        if below is not None and any(below.path == known.path for known in layers):
            chain = " -> ".join(known.label for known in (*reversed(layers), below))
            findings.problems.append(Problem(layer.label, "extends", f"goes round in a circle: {chain}",
                                             "A file may not extend itself, not even through others"))
            break
        layer = below
    return layers


def _open(name: str, folder: Path, asker: str, key: str, findings: Findings) -> Layer | None:
    """File or preset of a name. ``asker`` and ``key`` say where the name was written; none: on a command line."""
    installed = names("preset")
    if name.endswith(".toml") or "/" in name or (not asker and name not in installed and Path(name).is_file()):
        path = (folder / name).resolve()
        label = str(path.relative_to(Path.cwd())) if asker and path.is_relative_to(Path.cwd()) else str(path)
        label = label if asker else name
    else:
        accepted = f"{suggestion(name, installed)}Installed presets: {', '.join(installed) or 'none'}; or './file.toml'"
        if name not in installed:
            findings.problems.append(Problem(asker or name, key, f"no preset named {name!r}", accepted))
            return None
        try:
            path, label = Path(plugin.resource("preset", name)), f"preset {name}"
        except (PluginError, TypeError) as cause:
            findings.problems.append(Problem(asker or name, key, str(cause), accepted))
            return None
    try:
        return Layer(label, path.resolve().parent, tomllib.loads(path.read_text(encoding="utf-8")), path.resolve())
    except OSError as cause:
        why = cause.strerror or type(cause).__name__
        remedy = f"Write the path of a TOML file or a preset's name; installed: {', '.join(installed) or 'none'}"
        findings.problems.append(Problem(asker or name, key, f"cannot read {path}: {why}", remedy))
    except ValueError as cause:  # a TOMLDecodeError or text that is not UTF-8
        findings.problems.append(Problem(label, "", f"is no TOML: {cause}", "Correct the file at this place"))
    return None


def parse(text: str, label: str, folder: Path, findings: Findings) -> Layer:
    """Layer of a text."""
    try:
        return Layer(label, folder, tomllib.loads(text))
    except tomllib.TOMLDecodeError as cause:
        findings.problems.append(Problem(label, "", f"is no TOML: {cause}", "Correct the text at this place"))
        return Layer(label, folder, {})


def _merge(low: Table, high: Table, path: tuple[str, ...], label: str, origins: dict[str, str]) -> None:
    """Put ``high`` over ``low`` key by key. ``label`` is empty for the file that messages name anyway.

    Options belong to a plugin: where ``high`` names another one, those written for the former go.
    """
    if _another(low, high):
        if len(path) == 2 and path[0] == "actors" and isinstance(low.get("options"), dict):
            kept = _own(low, high, path[1])
            for name in [n for n in low["options"] if n not in kept]:
                del low["options"][name]
                _forget(origins, ".".join((*path, "options", name)))
        elif len(path) > 2 and path[0] == "actors":
            low.clear()
            _forget(origins, ".".join(path))
    for name, value in high.items():
        key = ".".join((*path, name))
        if isinstance(value, dict) and value:
            if not isinstance(low.get(name), dict):
                low[name] = {}
            _merge(low[name], value, (*path, name), label, origins)
            continue
        if not (isinstance(value, dict) and isinstance(low.get(name), dict)):
            low[name] = value
            _forget(origins, key)
        if label:
            origins[key] = label
        else:
            origins.pop(key, None)


def _forget(origins: dict[str, str], key: str) -> None:
    for known in [k for k in origins if k == key or k.startswith(key + ".")]:
        del origins[known]


def _another(low: Table, high: Table) -> bool:
    return bool(low) and "plugin" in high and high["plugin"] != low.get("plugin", high["plugin"])


def _own(low: Table, high: Table, instance: str) -> set[str]:
    """Options that are the actor's, not its plugin's."""
    kind = high.get("kind", low.get("kind", instance))
    cls = actor_type(kind) if isinstance(kind, str) else None
    if cls is None or kind != low.get("kind", instance):
        return set()
    return {f.encode_name for f in msgspec.structs.fields(cls.options_type)} | set(cls.plugs[1:])


def _absolute(table: Table, folder: Path, top: Path) -> None:
    """Turn ``./file.py:Class`` names of another folder into absolute ones: a plan has one base."""
    if folder == top:
        return
    for name, value in table.items():
        if isinstance(value, dict):
            _absolute(value, folder, top)
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, dict):
                    _absolute(item, folder, top)
        elif name == "plugin" and isinstance(value, str) and value.startswith(("./", "../")):
            table[name] = str(folder / value)


def _override(text: str, table: Table, accepted: Sequence[str], findings: Findings) -> Table | None:
    """Nested table of one ``a.b.c=value``, or None with a problem."""
    key, equals, value = text.partition("=")
    key = key.strip()
    try:
        path = _path(tomllib.loads(f"{key} = 0"))
    except tomllib.TOMLDecodeError:
        path = []
    if not path or not equals:
        findings.problems.append(Problem(SET, text, "is no assignment", "Write a.b.c=value"))
        return None
    if not _reachable(path, table, accepted, findings):
        return None
    try:
        read = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        read = {}
    made: Any = read["value"] if len(read) == 1 else value.strip()
    for name in reversed(path):
        made = {name: made}
    return dict(made)


def _path(table: Table) -> list[str]:
    path = []
    while isinstance(table, dict) and len(table) == 1:
        name, table = next(iter(table.items()))
        path.append(name)
    return path


def _reachable(path: list[str], table: Table, accepted: Sequence[str], findings: Findings) -> bool:
    """Whether the parents of an override's key exist; a new actor or cell is declared in a file."""
    key = ""
    for part in path:
        key = join(key, part)

    def refuse(what: str, name: str, known: Iterable[str]) -> bool:
        listed = sorted(known)
        findings.problems.append(Problem(SET, key, f"no {what} named {name!r}",
                                         f"{suggestion(name, listed)}Accepted: {', '.join(listed) or 'none'}"))
        return False

    if path[0] in ("extends", "schema"):
        findings.problems.append(Problem(SET, key, "cannot be overridden", f"Write {path[0]} in the file itself"))
        return False
    if path[0] not in accepted:
        return refuse("key", path[0], accepted)
    actors = table.get("actors")
    actors = actors if isinstance(actors, dict) else {}
    if path[0] == "actors" and len(path) > 1 and path[1] not in actors:
        return refuse("actor", path[1], actors)
    if path[0] == "cells" and len(path) > 1:
        cells = {str(a.get("cell", MAIN)) for a in actors.values() if isinstance(a, dict)} | set(table.get("cells", {}))
        if path[1] not in cells:
            return refuse("cell", path[1], cells)
    at: Any = table
    for depth, name in enumerate(path[:-1], start=1):
        at = at.get(name, {})
        if not isinstance(at, dict):
            findings.problems.append(Problem(SET, key, f"{'.'.join(path[:depth])} is {shown(at)}",
                                             "Only a table has keys below it"))
            return False
    return True


def _plain(table: Table, key: str, findings: Findings) -> None:
    """Refuse and remove values that JSON, in which a plan travels, cannot carry."""
    for name, value in list(table.items()):
        at = join(key, name)
        if isinstance(value, dict):
            _plain(value, at, findings)
        elif not _travels(value):
            findings.add(at, f"found {value}", "Write a string, a boolean, a finite 64-bit number, a list or a table")
            del table[name]


def _travels(value: Any) -> bool:
    if isinstance(value, dict | list):
        return all(map(_travels, value.values() if isinstance(value, dict) else value))
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return isinstance(value, str) or (isinstance(value, float) and math.isfinite(value))
