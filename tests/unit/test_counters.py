"""Counters: fixed names, so that a typing mistake is no new metric."""

import pytest

from antiphon.runtime.counters import POST, Counters


def test_every_name_stands_at_zero_from_the_beginning() -> None:
    assert Counters(POST) == dict.fromkeys(POST, 0)
    assert len(set(POST)) == len(POST)


def test_counting() -> None:
    counters = Counters(("a", "b"))
    counters.add("a")
    counters.add("b", 5)
    counters.add("b", 5)
    assert counters == {"a": 1, "b": 10}


def test_an_unknown_name_is_a_mistake() -> None:
    counters = Counters(("a",))
    with pytest.raises(KeyError):
        counters.add("aa")
    assert list(counters) == ["a"]
