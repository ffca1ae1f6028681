"""Near ties: answers in which the model's two best tokens were so close that the order of sums decides.

It does not know who gave the answers. HF transformers is asked, in float32.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

GAP = 2e-3  # a run whose best two logits were once closer than this is listed and left out


@cache
def reference(path: Path) -> Any:
    """HF's model of a directory or a GGUF file."""
    name = {"gguf_file": path.name} if path.is_file() else {}
    return AutoModelForCausalLM.from_pretrained(path.parent if name else path, dtype=torch.float32, **name)


def gaps(model: Any, prompt: Sequence[int], ids: Sequence[int]) -> tuple[list[int], float]:
    """HF's greedy choice at every generated position, and the smallest gap between its best two logits."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *ids[:-1]]])).logits[0, len(prompt) - 1:].float()
    best = logits.topk(2, dim=1).values
    return logits.argmax(dim=1).tolist(), float((best[:, 0] - best[:, 1]).min())


def close(path: Path, asked: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> set[int]:
    """Numbers of the answers with a near tie."""
    found = set()
    for number, (prompt, ids) in enumerate(zip(asked, answers, strict=True)):
        if (gap := gaps(reference(path), prompt, ids)[1]) < GAP:
            print(f"answer {number}: smallest gap {gap:.1e}, left out")
            found.add(number)
    return found
