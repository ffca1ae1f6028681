"""The four rooms: who may import whom, and what no file of this repository contains."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("runtime", "actors", "plugins", "kernels")
STDLIB = frozenset(sys.stdlib_module_names)
# DESIGN section 1. None: any library; the rooms are named with their full path.
MAY_IMPORT: dict[str, tuple[frozenset[str] | None, frozenset[str]]] = {
    "runtime": (frozenset({"msgspec", "zmq", "uvloop", "structlog"}), frozenset({"runtime"})),
    "actors": (frozenset({"msgspec", "structlog", "numpy"}), frozenset({"runtime", "actors"})),
    "plugins": (None, frozenset({"runtime", "actors", "kernels", "plugins"})),
    "kernels": (frozenset({"torch", "triton", "numpy"}), frozenset({"kernels"})),
}
FORBIDDEN_MODULES = frozenset({"pickle", "marshal", "dill", "cloudpickle", "multiprocessing", "shelve", "jsonpickle"})
FORBIDDEN_FILES = ("utils", "util", "common", "helpers", "misc")
MOST_LINES = 400
ONE_PLACE = ("actors/protocol.py",)  # DESIGN section 3: the whole vocabulary on one page


def sources(*folders: str) -> list[Path]:
    return sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py") if "__pycache__" not in p.parts)


# src/antiphon links to the rooms, which are read where they stand.
EVERYTHING = [*sources(*ROOMS, "tests"), *sorted((ROOT / "src" / "antiphon").glob("*.py"))]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every import of a file, also those inside functions and for type checkers."""
    package = ["antiphon", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (above, node.module or "") if part)
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def offences(room: str, path: Path) -> Iterator[str]:
    libraries, rooms = MAY_IMPORT[room]
    for line, module in imported(path):
        top, _, rest = module.partition(".")
        if top == "antiphon":
            # `import antiphon` is the callers' surface; the command line is a caller too.
            allowed = rest.partition(".")[0] in rooms or (room == "plugins" and rest.partition(".")[0] not in ROOMS)
        else:
            allowed = top in STDLIB or libraries is None or top in libraries
        if not allowed:
            yield f"{name(path)}:{line} imports {module}"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    assert [found for path in sources(room) for found in offences(room, path)] == []


def registered() -> set[str]:
    """Modules that hold a plugin, by the entry points of this package."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    return {
        target.partition(":")[0]
        for group, entries in points.items() if group not in ("antiphon.actor", "antiphon.section", "antiphon.preset")
        for target in entries.values()
    }


def test_plugins_of_different_kinds_do_not_know_each_other() -> None:
    """What plugins of several kinds share lies in modules that hold no plugin."""
    holds_plugin = registered()
    found = []
    for path in sources("plugins"):
        folder = path.relative_to(ROOT).parts[1]
        for line, module in imported(path):
            known = next((m for m in holds_plugin if module == m or module.startswith(m + ".")), None)
            if known is not None and known.split(".")[2] != folder:
                found.append(f"{name(path)}:{line} imports {module}")
    assert found == []


def test_actors_name_no_concrete_plugin() -> None:
    concrete = registered()
    assert [f"{name(p)}:{line}" for p in sources("actors", "runtime") for line, m in imported(p)
            if any(m.startswith(c) for c in concrete)] == []


def test_nothing_revives_objects_from_bytes_or_forks() -> None:
    assert [f"{name(path)}:{line} imports {module}" for path in EVERYTHING for line, module in imported(path)
            if module.partition(".")[0] in FORBIDDEN_MODULES] == []


def test_no_task_is_started_and_forgotten() -> None:
    """A task whose result nobody holds may vanish, and its failure with it; an actor's tasks are spawned."""
    found = []
    for path in sources(*ROOMS):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and (
                    _called(node.value) in ("create_task", "ensure_future")):
                found.append(f"{name(path)}:{node.lineno}")
            if path.is_relative_to(ROOT / "actors") and isinstance(node, ast.Call) and _called(node) == "create_task":
                found.append(f"{name(path)}:{node.lineno}")
    assert found == []


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def test_no_file_is_longer_than_four_hundred_lines() -> None:
    lengths = {name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in EVERYTHING}
    assert {n: lines for n, lines in lengths.items() if lines > MOST_LINES and n not in ONE_PLACE} == {}


def test_names_say_what_things_are() -> None:
    found = []
    for path in EVERYTHING:
        if path.stem in FORBIDDEN_FILES or path.stem.startswith("base_") or path.parent.name in FORBIDDEN_FILES:
            found.append(name(path))
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef) and ("Manager" in node.name or "Mixin" in node.name):
                found.append(f"{name(path)}:{node.lineno} {node.name}")
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and (
                    node.name.lower().startswith("base_") or node.name in FORBIDDEN_FILES):
                found.append(f"{name(path)}:{node.lineno} {node.name}")
    assert found == []


def test_the_rooms_hold_no_package_file() -> None:
    """`kernels/__init__.py` would shadow a package of that name which transformers imports."""
    assert [room for room in ROOMS if (ROOT / room / "__init__.py").exists()] == []


def loaded_by(statement: str) -> set[str]:
    """Modules in a fresh interpreter after a statement."""
    program = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("statement", [
    "import antiphon",
    "import antiphon.__main__ as m, contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()): m.main(['--help'])",
])
def test_the_surface_loads_neither_torch_nor_numpy(statement: str) -> None:
    assert loaded_by(statement) & {"torch", "numpy", "transformers", "tokenizers"} == set()
