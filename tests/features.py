"""The features that must work together, and the table of what shows that they do.

Run as a script it writes docs/features.md. It does not run tests; it reads their markers.
"""

import ast
from enum import StrEnum
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "features.md"


class Feature(StrEnum):
    """One enters when it is built."""

    SAMPLING = "sampling"  # temperature, top-k, top-p by the coupled rule
    DRAFTS = "drafts"  # chains of drafts, verified
    TREES = "trees"  # trees of drafts
    CHUNKED_PREFILL = "chunked-prefill"
    PREEMPTION = "preemption"
    WINDOWS = "windows"  # KV groups that keep a window
    ONE_AHEAD = "one-ahead"  # steps planned before the one in flight is verified
    CRASH_REPLAY = "crash-replay"
    PLACEMENT = "placement"  # actors in processes of their own
    DIRECT = "direct-delivery"
    PREFIX_CACHE = "prefix-cache"
    TIERS = "tiers"  # KV blocks in RAM, on disk, in Redis


# Pairs that the graph check refuses, with a part of its message.
REFUSED: dict[frozenset[Feature], str] = {}


def shown() -> dict[frozenset[Feature], list[str]]:
    """Tests by the pair of features they show together; a test may show many pairs."""
    found: dict[frozenset[Feature], list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for names in filter(None, map(_marked, node.decorator_list)):
                features = [Feature(name) for name in names]
                for pair in [*combinations(features, 2), *((f, f) for f in features)]:
                    found.setdefault(frozenset(pair), []).append(f"{path.relative_to(ROOT)}::{node.name}")
    return found


def _marked(decorator: ast.expr) -> list[str]:
    """Names in ``@pytest.mark.feature("a", "b")``."""
    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.feature":
        return [a.value for a in decorator.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return []


def table() -> str:
    """docs/features.md."""
    tests = shown()
    names = list(Feature)
    numbers = {test: n for n, test in enumerate(sorted({t for ts in tests.values() for t in ts}), start=1)}
    lines = [
        "# What works together", "",
        "Made by `python tests/features.py` from the markers of the tests and the refusals of `antiphon check`.",
        "A number is a test below that shows row and column together; a cell may not be empty.", "",
        "| | " + " | ".join(names) + " |", "|---|" + "---|" * len(names),
    ]
    for row in names:
        cells = []
        for column in names:
            pair = frozenset((row, column))
            found = sorted(numbers[t] for t in tests.get(pair, ()))
            cells.append("refused" if pair in REFUSED else ", ".join(map(str, found[:3])))
        lines.append(f"| **{row}** | " + " | ".join(cells) + " |")
    lines += ["", *(f"{n}. `{test}`" for test, n in numbers.items()), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8")
