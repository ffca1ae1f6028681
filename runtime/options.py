"""Shares out an actor's options between the actor and the plugins it hosts.

It does not know what any option means.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from antiphon.runtime.actor import Actor
from antiphon.runtime.plan import ActorPlan, Plan
from antiphon.runtime.tables import Findings, article, join, read, shown


class Use(NamedTuple):
    """One plugin that an actor hosts: its name, its options and the key path they stand under.

    ``also`` are keys of the same table that others read.
    """

    kind: str
    name: str
    options: dict[str, Any]
    key: str
    also: tuple[str, ...] = ()


class Division(NamedTuple):
    """Options of the actor itself, and the plugins by kind, the actor's first kind first."""

    own: dict[str, Any]
    uses: dict[str, Use]


def divide(cls: type[Actor[Any]], actor: ActorPlan, findings: Findings) -> Division:
    """Share out ``actor.options``: the actor's own fields, ``{plugin = NAME, ...}`` by kind, the rest to its plugin."""
    key = f"{join('actors', actor.instance)}.options"
    fields = fields_of(cls)
    first, others = cls.plugs[:1], cls.plugs[1:]
    own = {k: v for k, v in actor.options.items() if k in fields and k not in others}
    rest = {k: v for k, v in actor.options.items() if k not in own and k not in others}
    if not first:
        own |= rest  # no plugin takes them: reading the actor's options will name them
    uses = {kind: Use(kind, actor.plugin, rest, key, (*fields, *others)) for kind in first if actor.plugin}
    for kind in others:
        use = nested(kind, actor.options[kind], join(key, kind), findings) if kind in actor.options else None
        if kind not in actor.options and (default := defaults(cls).get(kind)):
            use = Use(kind, default, {}, join(key, kind))
        if use is not None:
            uses[kind] = use
    return Division(own, uses)


def nested(kind: str, table: Any, key: str, findings: Findings) -> Use | None:
    """The plugin that ``{plugin = NAME, ...}`` declares, or None with a problem."""
    if isinstance(table, Mapping) and isinstance(table.get("plugin"), str):
        return Use(kind, table["plugin"], {k: v for k, v in table.items() if k != "plugin"}, key)
    findings.add(key, f"found {shown(table)}", f'Write a table that names {article(kind)}: {{ plugin = "NAME", ... }}')
    return None


def fields_of(cls: type[Any]) -> list[str]:
    """Names of the options of an actor or plugin class."""
    return [f.encode_name for f in msgspec.structs.fields(cls.options_type)]


def defaults(cls: type[Any]) -> dict[str, str]:
    """By kind: the plugin an actor takes where the config names none."""
    return dict(getattr(cls, "defaults", {}))


def read_options(cls: type[Any], use: Use, findings: Findings) -> Any:
    """Options of a plugin as its struct, or None with a problem."""
    return read(cls.options_type, use.options, use.key, findings, use.also)


def typed_sections(plan: Plan, sections: Mapping[str, type[Any]], findings: Findings) -> dict[str, Any]:
    """Shared tables as structs; one that the config leaves out has its defaults."""
    made = {name: read(kind, plan.sections.get(name, {}), name, findings) for name, kind in sections.items()}
    return {name: section for name, section in made.items() if section is not None}
