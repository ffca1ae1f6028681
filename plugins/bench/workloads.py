"""The workloads A-E: their prompts as token ids, how many tokens each asks for, and the figures they give.

It does not know who answers. The prompts that come with Antiphon are for vocabularies of 49,152 ids or more.
"""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import msgspec

from antiphon.plugins.bench.figures import BenchError

LETTERS = "ABCDE"
TOKENS = {"A": 128, "B": 1, "C": 64, "D": 32, "E": 256}  # asked for of each prompt
FORMAT = """{"A": [[ids], ...], "B": [[ids], ...], "C": [[[ids], ...], ...], \
"D": [{"cold": [[ids], ...], "warm": [[ids], ...]}, ...], "E": [ids]}, number 0 of A-D for warming up"""

Prompt = list[int]


class Shared(msgspec.Struct, forbid_unknown_fields=True):
    """Two groups of prompts with one prefix: nothing is cached before ``cold``, the prefix is before ``warm``."""

    cold: list[Prompt]
    warm: list[Prompt]


class Workloads(msgspec.Struct, forbid_unknown_fields=True):
    """Prompts by workload. Of A-D there are variants: number 0 warms up, the others are measured. E has one prompt."""

    A: list[Prompt] = []
    B: list[Prompt] = []
    C: list[list[Prompt]] = []
    D: list[Shared] = []
    E: Prompt = []

    def variant(self, run: int, letter: str) -> int:
        """Number of the variant that run ``run`` (from 1) measures; with more runs than variants they come again."""
        count = len(getattr(self, letter))
        return 1 + (run - 1) % (count - 1) if count > 1 else 0

    def groups(self) -> list[list[Prompt]]:
        """Every group of prompts that is asked at once."""
        single = [[prompt] for prompt in (*self.A, *self.B, *([self.E] if self.E else []))]
        return single + self.C + [group for pair in self.D for group in (pair.cold, pair.warm)]


def read(path: Path | None, letters: Sequence[str]) -> Workloads:
    """Workloads of a JSON file, or Antiphon's own. Raises BenchError: the file is bad or lacks a letter."""
    source = path if path is not None else files(__package__) / "workloads.json"
    try:
        found = msgspec.json.decode(source.read_bytes(), type=Workloads)
    except OSError as cause:
        raise BenchError(f"{source}: {cause.strerror or cause}", 2) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as cause:
        raise BenchError(f"{source}: {cause}; expected {FORMAT}", 2) from None
    for group in found.groups():
        if not group or not all(group):
            raise BenchError(f"{source}: a workload has an empty prompt or no prompts", 2)
        if any(not 0 <= token < 1 << 31 for prompt in group for token in prompt):
            raise BenchError(f"{source}: a prompt has a token id that is no 31-bit number", 2)
    if missing := [letter for letter in letters if not getattr(found, letter)]:
        raise BenchError(f"{source}: no workload {', '.join(missing)}", 2)
    return found
