"""Reads a config's tables into typed structs and collects every mistake, not only the first.

It does not know what a table is for, nor where its text came from.
"""

import difflib
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from antiphon.runtime.errors import ConfigError, Problem
from antiphon.runtime.quantities import DURATION, SIZE, duration, size

S = TypeVar("S", bound=msgspec.Struct)

_LONGEST_SHOWN = 60
_AT = re.compile(r" - at `\$(.*)`$")
_INDEX = re.compile(r"\[\d+\]$")
_QUANTITIES: dict[str, tuple[Callable[[str], Any], str]] = {
    DURATION: (duration, 'a duration such as "250ms", "60s" or "5m"'),
    SIZE: (size, 'a size such as "512MiB" or "4GiB"'),
}


class Findings:
    """The problems of one deployment. ``origins`` names the file of each key that ``file`` did not write."""

    def __init__(self, file: str, origins: Mapping[str, str] | None = None):
        self.file = file
        self.origins = origins or {}
        self.problems: list[Problem] = []

    def add(self, key: str, found: str, remedy: str) -> None:
        """Note a mistake once: key path, what was found, what would be accepted."""
        problem = Problem(self.origin(key), key, found, remedy)
        if str(problem) not in map(str, self.problems):
            self.problems.append(problem)

    def mentions(self, beginning: str) -> bool:
        """Whether a problem's key begins so."""
        return any(problem.key.startswith(beginning) for problem in self.problems)

    def origin(self, key: str) -> str:
        """File that wrote a key, or the table the key stands in."""
        path = _INDEX.sub("", key)
        while path:
            if path in self.origins:
                return self.origins[path]
            path = path.rpartition(".")[0]
        return self.file

    def raise_any(self) -> None:
        """Raise ConfigError if there is a problem."""
        if self.problems:
            raise ConfigError(*self.problems)


def read(kind: type[S], table: Any, key: str, findings: Findings, also: Sequence[str] = ()) -> S | None:
    """Struct made of a table, strictly; None if ``findings`` got a problem.

    A field of type ``Seconds`` or ``Bytes`` takes text such as "60s". Nested structs are read likewise. ``also``
    are names that messages list as accepted because someone else reads them.
    """
    if not isinstance(table, Mapping):
        findings.add(key, f"found {shown(table)}", "Write a table")
        return None
    fields = {f.encode_name: f for f in msgspec.structs.fields(kind)}
    before = len(findings.problems)
    for name in table:
        if name not in fields:
            unknown(findings, join(key, name), name, [*fields, *also])
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in table:
            values[field.name] = _value(field.type, table[name], join(key, name), findings)
        elif field.required:
            findings.add(join(key, name), "is missing", f"Write {words(field.type)}")
    if len(findings.problems) > before:
        return None
    try:
        return kind(**values)
    except (ValueError, TypeError) as cause:  # from the struct's own __post_init__
        findings.add(key, str(cause), f"Accepted fields: {', '.join(fields)}")
        return None


def unknown(findings: Findings, key: str, name: str, accepted: Iterable[str], what: str = "key") -> None:
    """Note a name that nothing reads, with the nearest accepted one and the whole list."""
    known = list(accepted)
    findings.add(key, f"unknown {what} {name!r}", f"{suggestion(name, known)}Accepted: {', '.join(known) or 'none'}")


def suggestion(name: str, known: Iterable[str]) -> str:
    """``Did you mean 'x'? `` or nothing."""
    near = difflib.get_close_matches(name, [k for k in known if k != name], n=1)
    return f"Did you mean {near[0]!r}? " if near else ""


def article(noun: str) -> str:
    """``a pager``, ``an allocator``."""
    return f"{'an' if noun[:1] in 'aeiou' else 'a'} {noun}"


def join(key: str, name: str) -> str:
    """Key path of a name inside a table; a name that TOML would quote is quoted."""
    part = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else f'"{name}"'
    return f"{key}.{part}" if key else part


def shown(value: Any) -> str:
    """A value and its sort, as a message says it."""
    text = msgspec.json.encode(value).decode() if isinstance(value, str | list | dict | bool) else str(value)
    if len(text) > _LONGEST_SHOWN:
        text = text[:_LONGEST_SHOWN] + "..."
    sorts = {bool: "a boolean", str: "a string", int: "an integer", float: "a number", list: "a list", dict: "a table"}
    return f"{text} ({sorts.get(type(value), type(value).__name__)})"


def words(kind: Any) -> str:
    """What a type accepts, in words."""
    origin, arguments = get_origin(kind), get_args(kind)
    if quantity := _quantity(kind):
        return _QUANTITIES[quantity][1]
    if origin is Annotated:
        return words(arguments[0]) + _bounds(arguments[1:])
    if origin is Literal:
        listed = ", ".join(f'"{v}"' if isinstance(v, str) else str(v) for v in arguments)
        return f"one of {listed}" if len(arguments) > 1 else listed
    if origin in (Union, types.UnionType):
        return " or ".join(words(a) for a in arguments if a is not type(None))
    if origin in (list, tuple, set, frozenset) or kind in (list, tuple):
        return f"a list, each {words(arguments[0])}" if arguments and arguments[0] is not Any else "a list"
    if origin is dict or kind is dict:
        return "a table"
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return f"a table of {', '.join(f.encode_name for f in msgspec.structs.fields(kind))}"
    plain = {int: "an integer", float: "a number", str: "a string", bool: "true or false", Any: "any value"}
    return plain.get(kind, getattr(kind, "__name__", str(kind)))


def _value(kind: Any, value: Any, key: str, findings: Findings) -> Any:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return read(kind, value, key, findings)
    try:
        if (quantity := _quantity(kind)) and isinstance(value, str):
            value = _QUANTITIES[quantity][0](value)
        elif quantity == DURATION and value is not None:
            raise ValueError("a duration needs its unit")
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as cause:
        at = _AT.search(str(cause))
        inside = at[1] if at else ""
        why = f" ({_AT.sub('', str(cause)).replace('`', '')} at {inside})" if inside else ""
        findings.add(key + inside, f"found {shown(value)}{why}", f"Write {words(kind)}")
    except ValueError:
        findings.add(key, f"found {shown(value)}", f"Write {words(kind)}")
    return None


def _quantity(kind: Any) -> str:
    """Which quantity a field of this type holds: "duration", "size" or none."""
    if get_origin(kind) is Annotated:
        for meta in get_args(kind)[1:]:
            if isinstance(meta, msgspec.Meta) and meta.extra and "quantity" in meta.extra:
                return str(meta.extra["quantity"])
    if get_origin(kind) in (Union, types.UnionType):
        return next((q for a in get_args(kind) if (q := _quantity(a))), "")
    return ""


def _bounds(metas: Iterable[Any]) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "min_length": "length >=", "max_length": "length <=",
             "pattern": "matching"}
    found = [f"{sign} {getattr(meta, name)}" for meta in metas if isinstance(meta, msgspec.Meta)
             for name, sign in signs.items() if getattr(meta, name) is not None]
    return f" {', '.join(found)}" if found else ""
