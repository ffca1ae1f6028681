"""Durations and sizes as a config writes them."""

import msgspec
import pytest

from antiphon.runtime.quantities import Bytes, Seconds, duration, size
from antiphon.runtime.tables import Findings, read


@pytest.mark.parametrize(("text", "seconds"), [
    ("60s", 60.0), ("5m", 300.0), ("250ms", 0.25), ("2h", 7200.0), ("1.5s", 1.5), ("10us", 1e-5), (" 3 s ", 3.0),
])
def test_a_duration_is_a_number_with_a_unit(text: str, seconds: float) -> None:
    assert duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(("text", "count"), [
    ("4GiB", 4 << 30), ("100GB", 100 * 10**9), ("512MiB", 512 << 20), ("7B", 7), ("1.5KiB", 1536), ("2TiB", 2 << 40),
])
def test_a_size_is_a_number_with_a_unit(text: str, count: int) -> None:
    assert size(text) == count


@pytest.mark.parametrize("text", ["", "60", "s", "-1s", "1 minute", "1e3s", "4GiB", "5M", "1s 2s"])
def test_anything_else_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="us, ms, s, m, h"):
        duration(text)


@pytest.mark.parametrize("text", ["", "4", "4G", "4gib", "-4GiB", "60s", "0.5B"])
def test_anything_else_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"bytes|KiB"):
        size(text)


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    wait: Seconds = 1.0
    room: Bytes = 0
    rest: Seconds | None = None


def test_a_field_says_by_its_type_that_it_holds_a_quantity() -> None:
    findings = Findings("f")
    assert read(Holder, {"wait": "250ms", "room": "1MiB", "rest": "2m"}, "", findings) == Holder(
        wait=0.25, room=1 << 20, rest=120.0)
    assert read(Holder, {"room": 4096}, "", findings) == Holder(room=4096)
    assert not findings.problems


def test_a_duration_without_unit_and_other_sorts_are_refused() -> None:
    findings = Findings("f")
    assert read(Holder, {"wait": 5, "room": "lots", "rest": True}, "holder", findings) is None
    assert [str(p) for p in findings.problems] == [
        'f: holder.wait: found 5 (an integer). Write a duration such as "250ms", "60s" or "5m"',
        'f: holder.room: found "lots" (a string). Write a size such as "512MiB" or "4GiB"',
        'f: holder.rest: found true (a boolean). Write a duration such as "250ms", "60s" or "5m"',
    ]
