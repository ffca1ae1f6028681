"""The plan of a deployment: which actors run, with what options, wired how, in which cell.

It does not know TOML, nor whether the plan makes sense; it travels to cells as JSON.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from antiphon.runtime import plugin
from antiphon.runtime.errors import ConfigError, PluginError, Problem
from antiphon.runtime.quantities import Seconds
from antiphon.runtime.tables import article

Delivery = Literal["zmq", "direct"]
OnFailure = Literal["restart", "degrade"]
MAIN = "main"  # cell of an actor that names none


class ActorPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One instance. ``edges`` says for each kind it uses which instance that is."""

    instance: str
    kind: str
    plugin: str
    options: dict[str, Any] = {}
    edges: dict[str, str] = {}
    cell: str = MAIN
    on_failure: OnFailure = "restart"


class CellPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One process and its actors in start order: used before user."""

    name: str
    actors: list[str] = []
    replicas: int = 1
    host: str = "local"
    listen: str = ""


class Supervision(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A cell may die ``restarts`` times ``within`` seconds; it comes back after ``backoff``, doubled each time."""

    restarts: int = 3
    within: Seconds = 60.0
    backoff: Seconds = 0.1


class LogPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is logged and how; users' text only if ``prompts`` is set."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = "auto"
    prompts: bool = False


class Deadlines(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Seconds a cell may take to start and to stop, and an actor may hold waiting messages without progress."""

    start: Seconds = 300.0
    stop: Seconds = 10.0
    stall: Seconds = 120.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A whole deployment. ``cells`` stand in start order; ``origins`` names the file of keys ``file`` did not write."""

    file: str
    base: str  # directory that ./file.py names are relative to
    delivery: Delivery = "zmq"
    actors: dict[str, ActorPlan] = {}
    cells: dict[str, CellPlan] = {}
    sections: dict[str, dict[str, Any]] = {}
    supervision: Supervision = Supervision()
    log: LogPlan = LogPlan()
    deadlines: Deadlines = Deadlines()
    origins: dict[str, str] = {}

    def cell_of(self, instance: str) -> str:
        """Name of the cell an instance runs in."""
        return self.actors[instance].cell


def actor_type(kind: str) -> type[Any] | None:
    """Class of an actor kind, or None if there is none that loads."""
    try:
        found = plugin.resource("actor", kind)
    except PluginError:
        return None
    return found if isinstance(found, type) else None


def degrade(plan: Plan, instance: str) -> Plan:
    """The same plan with an optional actor's plugin replaced by its stand-in, without the plugin's options.

    Raises ConfigError: the actor has no stand-in.
    """
    actor = plan.actors[instance]
    cls = actor_type(actor.kind)
    if cls is None or not cls.stand_in:
        raise ConfigError(Problem(plan.file, f"actors.{instance}", f"{article(actor.kind)} has no plain stand-in",
                                  'Set on_failure = "restart"'))
    own = {f.encode_name for f in msgspec.structs.fields(cls.options_type)}
    plain = msgspec.structs.replace(
        actor, plugin=cls.stand_in, on_failure="restart", options={k: v for k, v in actor.options.items() if k in own},
    )
    return msgspec.structs.replace(plan, actors={**plan.actors, instance: plain})


def gather(plan: Plan) -> Plan:
    """The same plan with every actor in one cell, ``main``: the form that runs inside a program."""
    actors = {n: msgspec.structs.replace(a, cell=MAIN) for n, a in plan.actors.items()}
    order, _ = start_order(needs(actors))
    return msgspec.structs.replace(plan, actors=actors, cells={MAIN: CellPlan(name=MAIN, actors=order)})


def needs(actors: Mapping[str, ActorPlan]) -> dict[str, list[str]]:
    """By instance: those it uses, and those in its cell that provide a service it requires.

    Instances that provide a service stand first: others of the cell may look whether it is there.
    """
    types = {name: actor_type(actor.kind) for name, actor in actors.items()}
    found: dict[str, list[str]] = {}
    for name in sorted(actors, key=lambda n: not getattr(types[n], "provides", ())):
        actor = actors[name]
        required = set(getattr(types[name], "requires", ()))
        givers = [n for n, a in actors.items() if n != name and a.cell == actor.cell
                  and required & set(getattr(types[n], "provides", ()))]
        found[name] = [*actor.edges.values(), *(g for g in givers if g not in actor.edges.values())]
    return found


def cells_used(actors: Mapping[str, ActorPlan]) -> dict[str, list[str]]:
    """By cell: other cells that its actors use."""
    found: dict[str, list[str]] = {}
    for actor in actors.values():
        there = found.setdefault(actor.cell, [])
        there += {actors[e].cell: None for e in actor.edges.values() if actors[e].cell not in (actor.cell, *there)}
    return found


def start_order(needs: Mapping[str, Iterable[str]]) -> tuple[list[str], list[list[str]]]:
    """Names so that each comes after what it needs, and the cycles in the way (first name repeated last)."""
    order: dict[str, None] = {}
    cycles: list[list[str]] = []
    trail: list[str] = []

    def visit(name: str) -> None:
        if name in trail:
            cycles.append([*trail[trail.index(name):], name])
        elif name in needs and name not in order:
            trail.append(name)
            for needed in needs[name]:
                visit(needed)
            trail.pop()
            order[name] = None

    for name in needs:
        visit(name)
    return list(order), cycles
