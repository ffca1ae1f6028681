"""Builds an actor from its plan: finds classes, reads options, makes the plugins it hosts.

It does not check the graph; a plan that check.py accepted builds.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from antiphon.runtime import plugin
from antiphon.runtime.actor import Actor, ActorSite
from antiphon.runtime.errors import PluginError
from antiphon.runtime.options import Use, divide, nested, read_options, typed_sections
from antiphon.runtime.plan import Plan
from antiphon.runtime.tables import Findings, read


def actor_class(plan: Plan, instance: str) -> type[Actor[Any]]:
    """Class of an instance. Raises PluginError: unknown kind, or what is registered is no Actor."""
    kind = plan.actors[instance].kind
    found = plugin.resource("actor", kind)
    if not (isinstance(found, type) and issubclass(found, Actor)):
        raise PluginError(f"actor {kind!r} is {found!r}, not a subclass of Actor")
    return found


def build(plan: Plan, instance: str, site: ActorSite) -> Actor[Any]:
    """Make an instance with its plugins at ``site``, whose services and edges are set.

    Raises ConfigError: options that do not fit. PluginError: a plugin that is missing or does not load.
    """
    findings = Findings(plan.file, plan.origins)
    cls = actor_class(plan, instance)
    division = divide(cls, plan.actors[instance], findings)
    options = read(cls.options_type, division.own, f"actors.{instance}.options", findings)
    found = {kind: plugin.find(kind, use.name, Path(plan.base)) for kind, use in division.uses.items()}
    wanted = {*plan.sections, *cls.sections, *(s for p in found.values() for s in getattr(p, "sections", ()))}
    site.sections = typed_sections(plan, {name: plugin.resource("section", name) for name in sorted(wanted)}, findings)
    findings.raise_any()
    assert options is not None

    def builder(kind: str, table: Mapping[str, Any]) -> Any:
        inner = Findings(plan.file, plan.origins)
        use = nested(kind, table, f"actors.{instance}: {kind}", inner)
        inner.raise_any()
        assert use is not None
        return _make(plugin.find(kind, use.name, Path(plan.base)), use, site, inner)

    site.builder = builder
    # The first kind is made last, so that its constructor finds the others.
    for kind in reversed(division.uses):
        site.built[kind] = _make(found[kind], division.uses[kind], site, findings)
    return cls(options, site)


def _make(cls: type[Any], use: Use, site: ActorSite, findings: Findings) -> Any:
    options = read_options(cls, use, findings)
    findings.raise_any()
    assert options is not None
    return cls(options, site)
