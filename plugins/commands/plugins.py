"""``antiphon plugins``: lists what is installed and shows what one plugin takes, needs and gives.

It does not know any kind of plugin; classes and their docstrings tell.
"""

import argparse
import inspect
import json
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import msgspec

from antiphon.plugins.commands.command import Command
from antiphon.runtime import plugin
from antiphon.runtime.errors import PluginError
from antiphon.runtime.tables import suggestion, words


class Plugins(Command):
    """List and show plugins."""

    name = "plugins"
    help = "list installed plugins, or show what one takes, needs and gives"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """``list [KIND]`` and ``show NAME``."""
        verbs = parser.add_subparsers(dest="verb", required=True, metavar="list|show")
        listing = verbs.add_parser("list", help="names by kind, and the packages that bring them")
        listing.add_argument("kind", nargs="?", metavar="KIND", help="such as drafter, backend, vocabulary")
        show = verbs.add_parser("show", help="what one plugin takes, needs and gives")
        show.add_argument("name", metavar="NAME", help="an installed name, or ./file.py:Class together with --kind")
        show.add_argument("--kind", help="which kind, where several have this name")
        for verb in (listing, show):
            verb.add_argument("--json", action="store_true", help="print one JSON object a line")

    def run(self, args: argparse.Namespace) -> int:
        """Print a line a plugin, or a page a plugin."""
        if args.verb == "list":
            return _list(args.kind, args.json)
        pages = [page(kind, args.name) for kind in _kinds_of(args.name, args.kind)]
        if args.json:
            print(*map(json.dumps, pages), sep="\n")
        else:
            print(*map(_text, pages), sep="\n\n")
        return 0


def _list(kind: str | None, as_json: bool) -> int:
    points = _points()
    kinds = sorted({_kind(p) for p in points})
    if kind is not None and kind not in kinds:
        raise PluginError(f"no plugin kind {kind!r}. {suggestion(kind, kinds)}Accepted: {', '.join(kinds)}")
    chosen = [p for p in points if kind in (None, _kind(p))]
    if as_json:
        for point in chosen:
            print(json.dumps({"kind": _kind(point), "name": point.name, "package": _package(point),
                              "object": point.value}))
        return 0
    widths = [max(len(text) for text in column) for column in
              ([_kind(p) for p in chosen], [p.name for p in chosen], [_package(p) for p in chosen])]
    for point in chosen:
        cells = (_kind(point), point.name, _package(point))
        print("  ".join(f"{c:{w}}" for c, w in zip(cells, widths, strict=True)), point.value, sep="  ")
    return 0


def _points() -> list[EntryPoint]:
    """Everything installed, one pass over the packages' metadata; nothing is imported."""
    found = entry_points()
    groups = sorted(g for g in found.groups if g.startswith(plugin.PREFIX))
    return [p for group in groups for p in sorted(found.select(group=group), key=lambda p: p.name)]


def _kind(point: EntryPoint) -> str:
    return point.group.removeprefix(plugin.PREFIX)


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "?"


def _kinds_of(name: str, kind: str | None) -> list[str]:
    """Kinds to show ``name`` of. Raises PluginError: nothing has that name, or a file's kind is not told."""
    if kind is not None:
        return [kind]
    if ":" in name:
        raise PluginError(f"plugin {name!r} comes from a file: say which --kind it is")
    points = _points()
    found = [_kind(p) for p in points if p.name == name]
    if not found:
        known = sorted({p.name for p in points})
        raise PluginError(f"no plugin named {name!r}. {suggestion(name, known)}`antiphon plugins list` lists them")
    return found


def page(kind: str, name: str) -> dict[str, Any]:
    """What there is to say of one plugin."""
    is_file = ":" in name
    found = plugin.find(kind, name) if is_file or kind in _plugin_kinds() else plugin.resource(kind, name)
    shown: dict[str, Any] = {
        "kind": kind, "name": name, "package": "a file" if is_file else plugin.package_of(kind, name),
        "file": _file(found), "doc": _doc(found),
    }
    struct = found if isinstance(found, type) and issubclass(found, msgspec.Struct) \
        else getattr(found, "options_type", None)
    if struct is not None:
        shown["options"] = [_option(f) for f in msgspec.structs.fields(struct)]
    if isinstance(found, type) and issubclass(found, plugin.Plugin):
        shown |= {"api": found.api, "needs": sorted(found.needs), "gives": sorted(found.gives),
                  "where": sorted(found.where)}
    for attribute in ("plugs", "uses", "sections", "provides", "requires"):
        if value := getattr(found, attribute, ()):
            shown[attribute] = list(value)
    if getattr(found, "lossy", False):
        shown["lossy"] = True
    if defaults := getattr(found, "defaults", {}):
        shown["defaults"] = [f"{plug} {default}" for plug, default in defaults.items()]
    return shown


def _plugin_kinds() -> set[str]:
    return plugin.kinds().keys() - {"actor", "command", "preset", "section"}


def _file(found: Any) -> str:
    if isinstance(found, Path):
        return str(found)
    try:
        return str(Path(inspect.getfile(found)).resolve())
    except (TypeError, OSError):
        return ""


def _doc(found: Any) -> str:
    # A Struct without a docstring of its own shows its signature; that says no more than its fields do.
    return inspect.cleandoc(found.__doc__ or "") if isinstance(found, type) else ""


def _option(field: msgspec.structs.FieldInfo) -> dict[str, Any]:
    option: dict[str, Any] = {"name": field.encode_name, "type": words(field.type), "required": field.required}
    if not field.required:
        default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
        option["default"] = msgspec.to_builtins(default)
    return option


def _text(shown: dict[str, Any]) -> str:
    lines = [f"{shown['kind']} {shown['name']}  ({shown['package']})", f"  {shown['file']}"]
    lines += [f"  {line}".rstrip() for line in ["", *shown["doc"].splitlines()]] if shown["doc"] else []
    if shown.get("options"):
        width = max(len(o["name"]) for o in shown["options"])
        lines += ["", "  options"]
        for o in shown["options"]:
            default = "required" if o["required"] else f"default {json.dumps(o['default'])}"
            lines.append(f"    {o['name']:{width}}  {o['type']}; {default}")
    elif "options" in shown:
        lines += ["", "  options: none"]
    if shown.get("lossy"):
        lines.append("  lossy: yes")
    for name in ("needs", "gives", "where", "plugs", "defaults", "uses", "sections", "provides", "requires"):
        if shown.get(name):
            lines.append(f"  {name}: {', '.join(shown[name])}")
    return "\n".join(lines)
