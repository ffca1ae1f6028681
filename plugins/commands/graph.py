"""``antiphon graph``: draws a deployment after expansion, as text, mermaid or JSON.

It does not know whether the graph can run; ``antiphon check`` does.
"""

import argparse
from typing import Any

import msgspec

from antiphon.plugins.commands.command import Command, add_config
from antiphon.runtime.graph import ActorPlan, Plan, load


class Graph(Command):
    """Draw a deployment."""

    name = "graph"
    help = "draw a deployment's actors, cells and edges after expansion"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """CONFIG, --set, --format."""
        add_config(parser)
        parser.add_argument("--format", choices=("text", "mermaid", "json"), default="text")

    def run(self, args: argparse.Namespace) -> int:
        """Print the graph."""
        plan = load(args.config, args.overrides)
        print({"text": text, "mermaid": mermaid, "json": as_json}[args.format](plan))
        return 0


def text(plan: Plan) -> str:
    """One paragraph a cell, one line an actor."""
    width = max((len(name) for name in plan.actors), default=0)
    lines = [f"{plan.file}, {plan.delivery} delivery"]
    for name, cell in plan.cells.items():
        lines += ["", f"cell {name}"]
        for actor in (plan.actors[instance] for instance in cell.actors):
            edges = f" -> {', '.join(actor.edges.values())}" if actor.edges else ""
            lines.append(f"  {actor.instance:{width}}  {_label(actor)}{edges}")
            lines += [f"  {'':{width}}    {key} = {_toml(value)}" for key, value in actor.options.items()]
    for name, section in plan.sections.items():
        lines += ["", f"[{name}]", *(f"  {key} = {_toml(value)}" for key, value in section.items())]
    return "\n".join(lines)


def mermaid(plan: Plan) -> str:
    """A flowchart with one subgraph a cell."""
    lines = ["flowchart LR"]
    for index, (name, cell) in enumerate(plan.cells.items()):
        lines.append(f'  subgraph cell{index}["cell {name}"]')
        lines += [f'    {_node(i)}["{i}<br/>{_quoted(_label(plan.actors[i]))}"]' for i in cell.actors]
        lines.append("  end")
    lines += [f"  {_node(a.instance)} --> {_node(used)}" for a in plan.actors.values() for used in a.edges.values()]
    return "\n".join(lines)


def as_json(plan: Plan) -> str:
    """The plan itself, without the record of which file wrote which key."""
    return msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(plan, origins={})), indent=2).decode()


def _label(actor: ActorPlan) -> str:
    kind = "" if actor.kind == actor.instance else f"{actor.kind} "
    degrade = ", may degrade" if actor.on_failure == "degrade" else ""
    return f"{kind}{actor.plugin or '-'}{degrade}"


def _node(instance: str) -> str:
    # "end" and a few other words mean something to mermaid.
    return f"actor_{instance.replace('-', '__')}"


def _quoted(label: str) -> str:
    return label.replace('"', "#quot;")


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return msgspec.json.encode(value).decode()
