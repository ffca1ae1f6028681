"""Turns a deployment's config into a plan: typed tables, edges between instances, actors in cells in start order.

It does not know plugins or their options; check.py judges whether the plan can run.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from antiphon.runtime import layers
from antiphon.runtime.plan import (
    MAIN,
    ActorPlan,
    CellPlan,
    Deadlines,
    Delivery,
    LogPlan,
    OnFailure,
    Plan,
    Supervision,
    actor_type,
    cells_used,
    degrade,
    gather,
    needs,
    start_order,
)
from antiphon.runtime.tables import Findings, join, read, shown, suggestion, unknown

__all__ = ["ActorPlan", "CellPlan", "Plan", "degrade", "draft", "draft_text", "from_text", "gather", "load"]

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")  # names become parts of socket files, whose paths are short
_RESERVED = ("root",)


class ActorTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[actors.NAME]``."""

    kind: str = ""
    plugin: str = ""
    options: dict[str, Any] = {}
    uses: list[str] = []
    cell: str = MAIN
    on_failure: OnFailure = "restart"


class CellTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[cells.NAME]``."""

    replicas: int = 1
    host: str = "local"
    listen: str = ""


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The keys of a config that are no tables."""

    schema: Literal[1] = 1
    delivery: Delivery = "zmq"


_HEAD = ("schema", "delivery")
_TABLES = ("actors", "cells", "supervision", "log", "deadlines")


def load(source: str | Path, overrides: Sequence[str] = ()) -> Plan:
    """Plan of a TOML file or of an installed preset, with ``a.b.c=value`` overrides.

    Raises ConfigError with every mistake of the config's form; ``check.examine`` looks for all the others too.
    """
    plan, findings = draft(str(source), overrides)
    findings.raise_any()
    return plan


def from_text(text: str, overrides: Sequence[str] = (), *, file: str = "config", base: Path | None = None) -> Plan:
    """Plan of a TOML text. Raises ConfigError as ``load`` does."""
    plan, findings = draft_text(text, overrides, file=file, base=base)
    findings.raise_any()
    return plan


def draft_text(text: str, overrides: Sequence[str] = (), *, file: str = "config",
               base: Path | None = None) -> tuple[Plan, Findings]:
    """``draft`` of a TOML text."""
    findings = Findings(file)
    return draft(layers.parse(text, file, (base or Path.cwd()).resolve(), findings), overrides, findings)


def draft(top: layers.Layer | str, overrides: Sequence[str] = (),
          findings: Findings | None = None) -> tuple[Plan, Findings]:
    """As much of a plan as can be made, and the problems met while making it."""
    findings = findings or Findings(top if isinstance(top, str) else top.label)
    sections = layers.names("section")
    accepted = [*_HEAD, "extends", *_TABLES, *sections]
    merged = layers.merge(top, overrides, accepted, findings)
    table = merged.table
    if not merged.whole:
        return Plan(file=merged.label, base=str(merged.folder)), findings
    for name in table:
        if name not in accepted:
            unknown(findings, join("", name), name, accepted, "table or key")
    head = read(Head, {k: table[k] for k in _HEAD if k in table}, "", findings) or Head()
    actors = _actors(_table(table, "actors", findings), findings)
    return Plan(
        file=merged.label,
        base=str(merged.folder),
        delivery=head.delivery,
        actors=actors,
        cells=_cells(actors, _table(table, "cells", findings), findings),
        sections={name: _table(table, name, findings) for name in sections if name in table},
        supervision=read(Supervision, table.get("supervision", {}), "supervision", findings) or Supervision(),
        log=read(LogPlan, table.get("log", {}), "log", findings) or LogPlan(),
        deadlines=read(Deadlines, table.get("deadlines", {}), "deadlines", findings) or Deadlines(),
        origins=merged.origins,
    ), findings


def _table(table: Mapping[str, Any], name: str, findings: Findings) -> dict[str, Any]:
    found = table.get(name, {})
    if isinstance(found, dict):
        return found
    findings.add(name, f"found {shown(found)}", f"Write a table [{name}]")
    return {}


def _actors(tables: Mapping[str, Any], findings: Findings) -> dict[str, ActorPlan]:
    """Instances with their edges resolved."""
    read_tables: dict[str, ActorTable] = {}
    for name, table in tables.items():
        _named("actors", name, findings)
        read_tables[name] = read(ActorTable, table, join("actors", name), findings) or _rest(table)
    kinds = {name: table.kind or name for name, table in read_tables.items()}
    return {
        name: ActorPlan(
            instance=name,
            kind=kinds[name],
            plugin=table.plugin or _default(kinds[name]),
            options=table.options,
            edges=_edges(name, table.uses, kinds, findings),
            cell=table.cell,
            on_failure=table.on_failure,
        )
        for name, table in read_tables.items()
    }


def _rest(table: Any) -> ActorTable:
    """What can be read of a table with mistakes, so that the other mistakes are found too."""
    silent = Findings("")
    return ActorTable(**{
        field.name: value
        for field in msgspec.structs.fields(ActorTable)
        if isinstance(table, dict) and field.name in table
        and (alone := read(ActorTable, {field.name: table[field.name]}, "", silent)) is not None
        for value in [getattr(alone, field.name)]
    })


def _default(kind: str) -> str:
    """Plugin of an actor that names none."""
    cls = actor_type(kind)
    plugs = getattr(cls, "plugs", ())
    return str(getattr(cls, "defaults", {}).get(plugs[0], "")) if plugs else ""


def _edges(name: str, uses: Sequence[str], kinds: Mapping[str, str], findings: Findings) -> dict[str, str]:
    edges: dict[str, str] = {}
    for index, used in enumerate(uses):
        key = f"{join('actors', name)}.uses[{index}]"
        others = [n for n in kinds if n != name]
        if used == name:
            findings.add(key, f"{name!r} uses itself", f"Accepted: {', '.join(others) or 'none'}")
        elif used not in kinds:
            findings.add(key, f"no actor named {used!r}", f"{suggestion(used, others)}Declare [actors.{used}] "
                         f"or use one of: {', '.join(others) or 'none'}")
        elif edges.setdefault(kinds[used], used) != used:
            findings.add(key, f"a second {kinds[used]}: {edges[kinds[used]]!r} and {used!r}",
                         "An actor has one edge of each kind; leave one of them out")
    return edges


def _cells(actors: Mapping[str, ActorPlan], tables: Mapping[str, Any], findings: Findings) -> dict[str, CellPlan]:
    """Cells in start order. Cells that use each other stand in some order: their actors' order is right anyway."""
    order, _ = start_order(needs(actors))
    members: dict[str, list[str]] = {}
    for name in order:
        members.setdefault(actors[name].cell, []).append(name)
    for name, actor in actors.items():
        _named(f"actors.{name}.cell", actor.cell, findings)
    cell_order, _ = start_order(cells_used(actors))
    read_tables = {n: read(CellTable, t, join("cells", n), findings) or CellTable() for n, t in tables.items()}
    return {
        name: CellPlan(name=name, actors=members.get(name, []), replicas=table.replicas, host=table.host,
                       listen=table.listen)
        for name in [*cell_order, *(n for n in tables if n not in members)]
        for table in [read_tables.get(name, CellTable())]
    }


def _named(key: str, name: str, findings: Findings) -> None:
    """Refuse a name that cannot be part of a socket file's name."""
    if not _NAME.fullmatch(name) or name in _RESERVED:
        findings.add(key if key.endswith(".cell") else join(key, name), f"the name {name!r}",
                     f"Write a letter, then letters, digits, '-' or '_', at most 32 in all; not {', '.join(_RESERVED)}")
