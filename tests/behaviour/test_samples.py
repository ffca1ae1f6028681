"""Several answers to one prompt: each is what it would be alone, whatever their number."""

import pytest
from tests.harness import DELIVERIES, graph

from antiphon import Refused

OPTIONS = {"temperature": 0.9, "seed": 11, "max_tokens": 20, "raw": True}


@pytest.mark.feature("sampling", "one-ahead")
@pytest.mark.parametrize("name", DELIVERIES)
@pytest.mark.parametrize("size", [1, 4, 16])
def test_a_sample_does_not_depend_on_how_many_there_are(name: str, size: int) -> None:
    prompt = list(range(3, 30))
    with graph(f"delivery={name!r}", f"actors.allocator.options.block_size={size}",
               "actors.scheduler.options.max_chunk=8") as llm:
        alone = llm.generate(prompt, **OPTIONS)
        few, many = llm.samples(prompt, 2, **OPTIONS), llm.samples(prompt, 9, **OPTIONS)
        assert llm.stats()["allocator"]["holds"] == 0
    assert few[0].ids == many[0].ids == alone.ids
    assert few[1].ids == many[1].ids
    assert len({tuple(c.ids) for c in many}) == 9


def test_a_number_that_makes_no_sense_is_refused() -> None:
    with graph() as llm, pytest.raises(Refused, match="n is 0"):
        llm.samples("hi", 0)
