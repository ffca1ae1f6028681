"""Plugins: how they are declared, found and checked.

Finds a class by entry point name or by ``./file.py:Class`` and compares its kind and API version. It does
not know what any kind of plugin does.
"""

import importlib.util
import sys
from collections.abc import Mapping
from importlib import metadata
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Generic, Protocol, TypeVar, get_args, get_origin

import msgspec

from antiphon.runtime.errors import PluginError

PREFIX = "antiphon."


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of a plugin's or actor's options: immutable, unknown fields are an error."""


O = TypeVar("O", bound=Options)  # noqa: E741 - the conventional letter for options
P = TypeVar("P", bound="Plugin[Any]")


class Site(Protocol):
    """What a plugin sees of the place it runs in."""

    @property
    def instance(self) -> str:
        """Name of the actor instance that owns the plugin."""

    @property
    def log(self) -> Any:
        """Bound structlog logger."""

    def section(self, name: str) -> Any:
        """Typed shared table of the deployment, such as ``[model]``."""

    def service(self, name: str) -> Any:
        """Object that another actor of the same cell provides."""

    def build(self, kind: str, use: Mapping[str, Any]) -> Any:
        """Make the nested plugin that ``{plugin = NAME, ...}`` declares."""


class Plugin(Generic[O]):
    """Base of every plugin. A contract sets ``kind``; an author subclasses the contract.

    ``api`` is the version of the contract the plugin was written for. ``needs`` and ``gives`` are capabilities
    that the graph check matches. ``where`` says where the plugin can run: "host", "device" or both.
    """

    kind: ClassVar[str] = ""
    api: ClassVar[int] = 1
    needs: ClassVar[frozenset[str]] = frozenset()
    gives: ClassVar[frozenset[str]] = frozenset()
    where: ClassVar[frozenset[str]] = frozenset({"host"})
    options_type: ClassVar[type[Options]] = Options

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in getattr(cls, "__orig_bases__", ()):
            origin = get_origin(base)
            if isinstance(origin, type) and issubclass(origin, Plugin):
                argument = get_args(base)[0]
                if isinstance(argument, type) and issubclass(argument, Options):
                    cls.options_type = argument

    def __init__(self, options: O, site: Site):
        self.options = options
        self.site = site

    @classmethod
    def problems(cls, sections: Mapping[str, Any]) -> list[tuple[str, str]]:
        """What in the deployment's shared tables will keep the plugin from starting, each as (key, what is wrong).

        Asked by the graph check, so it must be quick and change nothing.
        """
        return []


def kinds() -> dict[str, list[str]]:
    """Installed plugin names by kind."""
    found: dict[str, set[str]] = {}
    for distribution in metadata.distributions():  # one pass: entry_points(group=...) reads all metadata each time
        for point in distribution.entry_points:
            if point.group.startswith(PREFIX):
                found.setdefault(point.group.removeprefix(PREFIX), set()).add(point.name)
    return {kind: sorted(names) for kind, names in sorted(found.items())}


def find(kind: str, name: str, base: Path | None = None) -> type[Any]:
    """Class registered for ``kind`` as ``name``, or named as ``./file.py:Class`` relative to ``base``.

    Raises PluginError: unknown name (lists the known ones), failing import, wrong kind or API version.
    """
    cls = _from_file(name, base) if ":" in name else _from_entry_point(kind, name)
    return cls if kind == "actor" else accept(kind, name, cls)


def accept(kind: str, name: str, cls: Any) -> type[Any]:
    """Refuse a class that is no plugin of ``kind`` or was written for another version of its contract."""
    if not (isinstance(cls, type) and issubclass(cls, Plugin)):
        raise PluginError(f"plugin {name!r} is {cls!r}, not a subclass of Plugin")
    if cls.kind != kind:
        raise PluginError(f"plugin {name!r} is a {cls.kind or 'plain Plugin'}, not a {kind}")
    contract = next(c for c in reversed(cls.__mro__) if issubclass(c, Plugin) and c.kind == kind)
    if cls.api != contract.api:
        raise PluginError(f"plugin {name!r} was written for {kind} api {cls.api}; this Antiphon has api {contract.api}")
    return cls


def resource(kind: str, name: str) -> Any:
    """Object registered under an entry point that is no Plugin (an actor class, a section, a preset path)."""
    return _from_entry_point(kind, name)


def package_of(kind: str, name: str) -> str:
    """Package and version that brings a plugin, for ``plugins show``."""
    for point in entry_points(group=PREFIX + kind):
        if point.name == name and point.dist is not None:
            return f"{point.dist.name} {point.dist.version}"
    return "a file"


def _from_entry_point(kind: str, name: str) -> Any:
    points = entry_points(group=PREFIX + kind)
    for point in points:
        if point.name == name:
            try:
                return point.load()
            except Exception as cause:
                raise PluginError(f"{kind} plugin {name!r} ({point.value}) does not load: {cause!r}") from cause
    known = ", ".join(sorted(p.name for p in points)) or "none"
    raise PluginError(f"no {kind} plugin named {name!r}; installed: {known}")


_files: dict[Path, ModuleType] = {}


def _from_file(name: str, base: Path | None) -> Any:
    text, _, attribute = name.rpartition(":")
    path = Path(text)
    if not text.endswith(".py") or not (text.startswith(("./", "../", "/"))):
        raise PluginError(f"plugin {name!r}: write an installed plugin's name or './file.py:Class'")
    path = ((base or Path.cwd()) / path).resolve()
    if not path.is_file():
        raise PluginError(f"plugin {name!r}: there is no file {path}")
    if path not in _files:
        module_name = f"antiphon_file_{path.stem}_{len(_files)}"
        spec = importlib.util.spec_from_file_location(module_name, path)
        if spec is None or spec.loader is None:
            raise PluginError(f"plugin {name!r}: {path} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as cause:
            del sys.modules[module_name]
            raise PluginError(f"plugin {name!r}: {path} does not load: {cause!r}") from cause
        _files[path] = module
    found = getattr(_files[path], attribute, None)
    if found is None:
        raise PluginError(f"plugin {name!r}: {path} has no {attribute!r}")
    return found
