"""Conversations whose KV outlives the server: their turns, the servers that hold them, and what tiers say of them.

It does not know where the KV is kept.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.callers import Ask, assert_owed, at_once, owed
from tests.harness import Server, until

SIZE = 8  # tokens of a block
# A tier that failed is opened again soon; what it holds is found and brought whatever that costs.
QUICK = ("actors.pager.options.retry='50ms'", "actors.pager.options.longest='200ms'", "actors.pager.options.look='5s'",
         "actors.allocator.options.find_deadline='10s'", "actors.allocator.options.bring='always'")


def kept(home: Path, tier: str, *, cache: str = "hash", blocks: int = 4096) -> tuple[str, ...]:
    """Settings of a server that keeps its KV in a tier (a TOML table); those with the same ``home`` share a secret."""
    return (f"actors.allocator.plugin={cache!r}", f"actors.allocator.options.block_size={SIZE}",
            f"actors.allocator.options.blocks={blocks}", f"actors.allocator.options.secret={str(home / 'secret')!r}",
            "actors.pager.plugin='tiered'", f"actors.pager.options.tiers=[{tier}]", *QUICK)


def opening(count: int, seed: int, tokens: int = 90) -> list[Ask]:
    """First turns: the same instructions, then something of their own; half of them sampled."""
    draw = random.Random(seed)
    instructions = [draw.randrange(512) for _ in range(tokens // 3)]
    made = []
    for i in range(count):
        own = [draw.randrange(512) for _ in range(draw.randint(tokens // 3, 2 * tokens // 3))]
        sampled = {"temperature": 0.9, "top_k": 40, "seed": 100 + i} if i % 2 else {}
        made.append(Ask((*instructions, *own), 12, **sampled))  # type: ignore[arg-type]
    return made


def after(turns: Sequence[Ask]) -> list[Ask]:
    """The next turns: what was asked, what was answered, and a few tokens more."""
    return [a._replace(prompt=(*a.prompt, *owed(a).ids, *range(i, i + 5))) for i, a in enumerate(turns)]


def answer(server: Server, turns: Sequence[Ask]) -> None:
    """Ask all at once; every answer must be that of a plain run."""
    assert_owed(turns, at_once(server.address, turns))


def stats(server: Server) -> dict[str, Any]:
    with server.client() as client:
        return client.stats()


def tier(server: Server, number: int = 0) -> dict[str, Any]:
    """Facts of a tier."""
    found: dict[str, Any] = stats(server)["pager"]["tiers"][number]
    return found


def written(server: Server) -> None:
    """Wait until all that was to be kept is in its tier."""
    def done() -> bool:
        found = stats(server)
        return (not found["pager"]["pending"] and not any(t["writing_bytes"] for t in found["pager"]["tiers"])
                and not found["allocator"]["holds"])

    until(done, 30, "everything is written")


def whole(server: Server) -> dict[str, Any]:
    """The allocator's facts once nobody runs: nothing may be held."""
    until(lambda: not stats(server)["allocator"]["holds"], 30, "nothing is held")
    found: dict[str, Any] = stats(server)["allocator"]
    assert found["faults"] == []
    return found


def kill_all(server: Server) -> None:
    """``kill -9`` of the root and every cell, the root first: it must not start any again."""
    cells = server.cells()
    server.process.kill()
    for process in cells.values():
        process.kill()
    server.process.wait(10)
    for process in cells.values():
        process.wait(10)
