"""docs/counters.md names what a deployment counts: all of KV memory, and nothing that does not exist."""

import re
from pathlib import Path

from tests.harness import graph

PAGE = Path(__file__).resolve().parents[2] / "docs" / "counters.md"


def documented() -> set[tuple[str, str]]:
    return set(re.findall(r"^\| (\w+) \| `(\w+)` \|", PAGE.read_text(), re.MULTILINE))


def test_the_page_and_a_deployment_agree() -> None:
    with graph("actors.allocator.plugin='hash'") as llm:
        stats, memory = llm.stats(), llm.cache()["allocators"]["allocator"]["counters"]
    named = documented()
    assert len(named) > 25
    assert {(actor, name) for actor, name in named if name not in stats[actor]} == set()
    assert {name for name in memory if ("allocator", name) not in named} == set()
