"""Judges whether a plan can run and says everything that is wrong with it before anything starts.

It does not know what any plugin or message means: classes declare what they accept, need, give and provide.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from antiphon.runtime import plugin
from antiphon.runtime.actor import Actor
from antiphon.runtime.errors import PluginError
from antiphon.runtime.graph import draft
from antiphon.runtime.layers import Layer
from antiphon.runtime.options import Use, divide, fields_of, nested, read_options, typed_sections
from antiphon.runtime.plan import ActorPlan, Plan, cells_used, needs, start_order
from antiphon.runtime.tables import Findings, article, join, read, shown, suggestion, unknown

NO_PLUGINS = frozenset({"actor", "command", "preset", "section"})  # kinds that no option holds
EVERYWHERE = "host"  # what ``where`` says of a plugin that needs no service of its cell
_LOCAL = re.compile(r"tcp://(127(\.\d{1,3}){3}|localhost|\[::1\]):(?P<port>\d{1,5}|\*)|(ipc|inproc)://\S+")
_NEEDS_KEYS = ("binds beyond this machine need keys, which this version does not have; "
               "use tcp://127.0.0.1:PORT or ipc://PATH")


class Note:
    """Something that is fine but worth saying."""

    __slots__ = ("key", "text")

    def __init__(self, key: str, text: str):
        self.key, self.text = key, text

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


def examine(source: str | Path | Layer, overrides: Sequence[str] = ()) -> tuple[Plan, list[Note]]:
    """Plan of a TOML file, preset or layer, fully checked. Raises ConfigError with every mistake there is."""
    plan, findings = draft(source if isinstance(source, Layer) else str(source), overrides)
    notes = _Inspection(plan, findings).run() if plan.actors or not findings.problems else []
    findings.raise_any()
    return plan, notes


def check(plan: Plan) -> list[Note]:
    """What is worth saying of a plan that can run. Raises ConfigError with everything that keeps it from running."""
    findings = Findings(plan.file, plan.origins)
    notes = _Inspection(plan, findings).run()
    findings.raise_any()
    return notes


class _Inspection:
    """One walk over a plan: classes first, then what they declare about each other."""

    def __init__(self, plan: Plan, findings: Findings):
        self.plan = plan
        self.findings = findings
        self.notes: list[Note] = []
        self.types: dict[str, type[Actor[Any]]] = {}  # by instance, those that load
        self.hosted: dict[str, list[tuple[Use, type[Any]]]] = {}
        self.sections: dict[str, Any] = {}
        self.installed = plugin.kinds()
        self.kinds = self.installed.keys() - NO_PLUGINS

    def run(self) -> list[Note]:
        """Every check; the notes."""
        if not self.plan.actors:
            self.findings.add("actors", "no actor is declared",
                              f"Declare [actors.NAME] or extend a preset: {', '.join(self._names('preset'))}")
        for instance, actor in self.plan.actors.items():
            self._actor(instance, actor)
        for instance, cls in self.types.items():
            self._plugins(instance, cls)
        self._capabilities()
        self._edges()
        self._cycles()
        self._placement()
        self._cells()
        self._listens()
        self._sections()
        if not self.findings.problems:
            self._crossings()
            found = {problem for hosted in self.hosted.values() for _, cls in hosted
                     for problem in cls.problems(self.sections)}
            for key, text in sorted(found):
                self.findings.add(key, text, "")
        return self.notes

    def _names(self, kind: str) -> list[str]:
        return self.installed.get(kind, [])

    # ---- classes and options

    def _actor(self, instance: str, actor: ActorPlan) -> None:
        key = join("actors", instance)
        installed = self._names("actor")
        try:
            cls = plugin.resource("actor", actor.kind)
        except PluginError as cause:
            at = key if actor.kind == instance else f"{key}.kind"
            accepted = f"Accepted: {', '.join(installed)}"
            if actor.kind in installed:
                self.findings.add(at, str(cause), accepted)
            else:
                self.findings.add(at, f"no actor kind {actor.kind!r}", suggestion(actor.kind, installed) + accepted)
            return
        if not (isinstance(cls, type) and issubclass(cls, Actor)):
            self.findings.add(f"{key}.kind", f"{actor.kind!r} is {cls!r}", "Register a subclass of Actor")
            return
        self.types[instance] = cls
        if actor.on_failure == "degrade" and not cls.stand_in:
            self.findings.add(f"{key}.on_failure", f'found "degrade", but {article(actor.kind)} has no plain stand-in',
                              'Write "restart"')

    def _plugins(self, instance: str, cls: type[Actor[Any]]) -> None:
        actor = self.plan.actors[instance]
        key = join("actors", instance)
        if cls.plugs and not actor.plugin:
            installed = ", ".join(self._names(cls.plugs[0])) or "none"
            self.findings.add(f"{key}.plugin", "is missing", f"Name {article(cls.plugs[0])}; installed: {installed}")
        if actor.plugin and not cls.plugs:
            self.findings.add(f"{key}.plugin", f"found {shown(actor.plugin)}",
                              f"Leave it out: {article(actor.kind)} takes no plugin")
        division = divide(cls, actor, self.findings)
        read(cls.options_type, division.own, f"{key}.options", self.findings)
        self.hosted[instance] = []
        for use in division.uses.values():
            self._plugin(instance, use)

    def _plugin(self, instance: str, use: Use) -> None:
        """Check one plugin and those its options declare: an option named like a kind holds plugins of that kind."""
        found = self._find(use, _plugin_key(instance, use))
        if found is None:
            return
        self.hosted[instance].append((use, found))
        options = read_options(found, use, self.findings)
        for name in fields_of(found) if options is not None else ():
            value = getattr(options, name, None)
            key, kind, tables = join(use.key, name), name, {join(use.key, name): value}
            if isinstance(value, list | tuple):
                kind, tables = name.removesuffix("s"), {f"{key}[{i}]": table for i, table in enumerate(value)}
            for at, table in tables.items():
                if kind in self.kinds and isinstance(table, Mapping) and table:
                    inner = nested(kind, table, at, self.findings)
                    if inner is not None:
                        self._plugin(instance, inner)

    def _find(self, use: Use, at: str) -> type[Any] | None:
        installed = self._names(use.kind)
        accepted = f"Installed: {', '.join(installed) or 'none'}; or './file.py:Class'"
        if ":" not in use.name and use.name not in installed:
            self.findings.add(at, f"no {use.kind} plugin named {use.name!r}",
                              suggestion(use.name, installed) + accepted)
            return None
        try:
            return plugin.find(use.kind, use.name, Path(self.plan.base))
        except PluginError as cause:
            self.findings.add(at, str(cause), accepted)
            return None

    # ---- what classes declare about each other

    def _capabilities(self) -> None:
        classes = [*self.types.values(), *(c for hosted in self.hosted.values() for _, c in hosted)]
        given: set[str] = set()
        for cls in classes:
            given |= set(getattr(cls, "gives", ()))
        here = ", ".join(sorted(given)) or "nothing"
        for instance, actor in self.types.items():
            options = self.plan.actors[instance].options
            for option, needs_of in actor.needing(options).items():
                for need in sorted(set(needs_of) - given):
                    self.findings.add(f"{join('actors', instance)}.options.{option}",
                                      f"{shown(options[option])} needs {need!r}, which nothing in this graph gives",
                                      f"Add a plugin that gives it; given here: {here}")
        for instance, hosted in self.hosted.items():
            for use, cls in hosted:
                for need in sorted(set(cls.needs) - given):
                    self.findings.add(_plugin_key(instance, use),
                                      f"{use.kind} {use.name!r} needs {need!r}, which nothing in this graph gives",
                                      f"Add a plugin that gives it; given here: {here}")

    def _edges(self) -> None:
        actors = self.plan.actors
        for instance, cls in self.types.items():
            actor = actors[instance]
            key = f"{join('actors', instance)}.uses"
            for kind, used in actor.edges.items():
                if used not in actors:
                    self.findings.add(key, f"no actor named {used!r}",
                                      f"{suggestion(used, actors)}Accepted: {', '.join(actors)}")
                elif kind not in cls.uses and used in self.types:
                    self.findings.add(key, f"{used!r} is {article(kind)}, which {article(actor.kind)} does not use",
                                      f"Accepted kinds: {', '.join(cls.uses) or 'none'}")
            # An edge that is misspelt, or leads to an actor of unknown kind, has its own message already.
            broken = self.findings.mentions(f"{key}[") or any(used not in self.types for used in actor.edges.values())
            for kind in cls.uses if not broken else ():
                if kind not in actor.edges:
                    there = [n for n, other in actors.items() if other.kind == kind]
                    self.findings.add(key, f"{article(actor.kind)} needs an edge to {article(kind)}",
                                      f"Add one of: {', '.join(there)}" if there
                                      else f"Declare [actors.{kind}] and add {kind!r}")
        kinds = {kind for cls in self.types.values() for kind in cls.uses}
        for instance, actor in actors.items():
            if actor.kind in kinds and not any(instance in other.edges.values() for other in actors.values()):
                self.notes.append(Note(join("actors", instance), "no actor uses it"))

    def _cycles(self) -> None:
        known = {n: [u for u in used if u in self.plan.actors] for n, used in needs(self.plan.actors).items()}
        _, cycles = start_order(known)
        for cycle in cycles:
            # The edge to take out is rather one that this file wrote than one of what it extends.
            keys = [f"{join('actors', n)}.uses" for n in cycle[:-1]]
            at = next((i for i, key in enumerate(keys) if self.findings.origin(key) == self.plan.file), 0)
            cycle[:] = [*cycle[at:-1], *cycle[:at], cycle[at]]
            self.findings.add(keys[at],
                              f"actors wait for each other in a circle: {' -> '.join(cycle)}",
                              "Remove one of these edges")
        actors = {n: a for n, a in self.plan.actors.items() if all(e in self.plan.actors for e in a.edges.values())}
        if len(actors) == len(self.plan.actors) and not cycles:
            for ring in start_order(cells_used(actors))[1]:
                self.notes.append(Note("cells", f"{' -> '.join(ring)} use each other: they start and stop together"))

    # ---- cells

    def _placement(self) -> None:
        provided: dict[str, dict[str, list[str]]] = {}  # service -> cell -> instances
        for instance, cls in self.types.items():
            for service in cls.provides:
                provided.setdefault(service, {}).setdefault(self.plan.cell_of(instance), []).append(instance)
        for service, cells in provided.items():
            for cell, providers in cells.items():
                if len(providers) > 1:
                    self.findings.add(f"{join('actors', providers[1])}.cell",
                                      f"{' and '.join(providers)} both provide {service!r} in cell {cell!r}",
                                      "Give one of them a cell of its own")
        for instance, cls in self.types.items():
            self._services(instance, cls.requires, article(cls.kind), join("actors", instance), provided)
            for use, hosted in self.hosted.get(instance, ()):
                what, key = f"{use.kind} {use.name!r}", _plugin_key(instance, use)
                self._services(instance, getattr(hosted, "requires", ()), what, key, provided)
                if EVERYWHERE not in hosted.where:
                    here = [w for w in sorted(hosted.where) if self.plan.cell_of(instance) in provided.get(w, {})]
                    self._services(instance, () if here else sorted(hosted.where)[:1], what, key, provided)

    def _services(self, instance: str, services: Iterable[str], what: str, who: str,
                  provided: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
        here = self.plan.cell_of(instance)
        for service in services:
            cells = provided.get(service, {})
            if here in cells:
                continue
            if cells:
                there = ", ".join(f"{' and '.join(i)} in cell {c!r}" for c, i in cells.items())
                self.findings.add(f"{join('actors', instance)}.cell",
                                  f"{what} must share its cell with what provides {service!r}; it is in cell {here!r}, "
                                  f"and {service!r} comes from {there}",
                                  "Write " + " or ".join(f'cell = "{c}"' for c in cells))
            else:
                self.findings.add(who, f"{what} requires {service!r}, which nothing in this graph provides",
                                  f"Add an actor that provides {service!r} to cell {here!r}")

    def _cells(self) -> None:
        used = {a.cell for a in self.plan.actors.values()}
        for name, cell in self.plan.cells.items():
            key = join("cells", name)
            if name not in used:
                self.findings.add(key, "no actor is placed in this cell",
                                  f"{suggestion(name, used)}Cells in use: {', '.join(sorted(used)) or 'none'}")
            if cell.replicas != 1:
                self.findings.add(f"{key}.replicas", f"found {shown(cell.replicas)}",
                                  "Write 1: replicas are not built yet")
            if cell.host != "local":
                self.findings.add(f"{key}.host", f"found {shown(cell.host)}",
                                  'Write "local": other machines are not built yet')

    def _listens(self) -> None:
        found = [(f"{join('cells', n)}.listen", c.listen) for n, c in self.plan.cells.items() if c.listen]
        for instance, actor in self.plan.actors.items():
            found += _listens_in(actor.options, f"{join('actors', instance)}.options")
        for key, value in found:
            for address in value if isinstance(value, list) else [value]:
                if isinstance(address, str) and (problem := _no_address(address)):
                    self.findings.add(key, f"found {shown(address)}", problem)

    # ---- shared tables and notes

    def _sections(self) -> None:
        installed = self._names("section")
        types: dict[str, type[Any]] = {}
        wanted: dict[str, str] = dict.fromkeys(self.plan.sections, "")
        for instance, cls in self.types.items():
            hosted = (s for _, c in self.hosted.get(instance, ()) for s in getattr(c, "sections", ()))
            for name in (*cls.sections, *hosted):
                wanted.setdefault(name, instance)
        for name, reader in wanted.items():
            if name not in installed:
                if reader:
                    self.findings.add(join("actors", reader), f"reads [{name}], which nothing installed declares",
                                      f"Installed sections: {', '.join(installed) or 'none'}")
                else:
                    unknown(self.findings, name, name, installed, "table")
                continue
            try:
                types[name] = plugin.resource("section", name)
            except PluginError as cause:
                self.findings.add(name, str(cause), f"Installed sections: {', '.join(installed)}")
        self.sections = typed_sections(self.plan, types, self.findings)

    def _crossings(self) -> None:
        """What an edge carries once it leaves the cell, as the used end declares it."""
        actors = self.plan.actors
        for user in actors.values():
            for used in (actors[name] for name in user.edges.values()):
                if user.cell != used.cell:
                    text = self.types[used.instance].crossing(user.kind, used.options, self.sections)
                    if text:
                        self.notes.append(Note(f"{user.instance} -> {used.instance}",
                                               f"leaves cell {user.cell} for {used.cell}: {text}"))


def _no_address(address: str) -> str:
    """Why nothing can listen there; empty: it can."""
    if "://" not in address:
        return "Write tcp://127.0.0.1:PORT or ipc://PATH"
    if (local := _LOCAL.fullmatch(address)) is None:
        return _NEEDS_KEYS
    port = local["port"]
    return f"Ports end at 65535; {port} is none" if port and port != "*" and int(port) > 65535 else ""


def _plugin_key(instance: str, use: Use) -> str:
    key = join("actors", instance)
    return f"{key}.plugin" if use.key == f"{key}.options" else f"{use.key}.plugin"


def _listens_in(value: Any, key: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        for name, inner in value.items():
            found += [(join(key, name), inner)] if name == "listen" else _listens_in(inner, join(key, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            found += _listens_in(inner, f"{key}[{index}]")
    return found
