"""Stored blocks: keys tell apart what must not be mixed, and damage of any kind is found."""

import msgspec
import numpy as np
import pytest
from tests.tiers import FACTS, POOLS, WHOLE, key

from antiphon.actors.model import KVGroup
from antiphon.plugins.pagers.estimate import Estimate
from antiphon.plugins.pagers.records import HEADER, BadRecord, Layout, digest_of, storage_key, unwrap, wrap


def test_a_payload_comes_back_bit_for_bit_from_bytes_views_and_arrays() -> None:
    payload = np.random.default_rng(0).bytes(1000)
    for given in (payload, memoryview(payload), np.frombuffer(payload, np.uint8)):
        assert bytes(unwrap(key(1), wrap(key(1), given))) == payload
    assert bytes(unwrap(key(1), wrap(key(1), b""))) == b""


def test_every_flipped_bit_is_found() -> None:
    record = wrap(key(1), b"payload")
    for bit in range(8 * len(record)):
        damaged = bytearray(record)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadRecord):
            unwrap(key(1), bytes(damaged))


@pytest.mark.parametrize("cut", [0, 1, HEADER - 1, HEADER, HEADER + 3])
def test_a_torn_record_is_found(cut: int) -> None:
    with pytest.raises(BadRecord):
        unwrap(key(1), wrap(key(1), b"payload")[:cut])
    with pytest.raises(BadRecord, match="bytes are there"):
        unwrap(key(1), wrap(key(1), b"payload") + b"more")


def test_a_record_under_a_foreign_key_is_found() -> None:
    with pytest.raises(BadRecord, match="another key"):
        unwrap(key(2), wrap(key(1), b"payload"))


def changed(group: KVGroup) -> list[KVGroup]:
    values = {"name": "x", "layers": 9, "heads": 9, "width": 9, "dtype": "bfloat16", "window": 9, "owner": "drafter",
              "quantization": "int8", "scale_bytes": 9}
    return [msgspec.structs.replace(group, **{field: value}) for field, value in values.items()]


def test_storage_keys_differ_by_all_that_gives_the_bytes_their_meaning() -> None:
    digests = [digest_of(FACTS, WHOLE, 4), digest_of(FACTS, WHOLE, 8),
               digest_of(msgspec.structs.replace(FACTS, digest="d2"), WHOLE, 4),
               *(digest_of(FACTS, group, 4) for group in changed(WHOLE))]
    assert len({storage_key(d, key(i)) for d in digests for i in range(3)}) == 3 * len(digests)


def test_storage_keys_are_the_same_in_every_process() -> None:
    assert Layout(FACTS, POOLS).keys(1, key(5))[0].hex() == (
        "c0dcd3bd1926ec3cf366f345ceb79c4c9d229cc0c56149539b00d8da7a9b3cf4")


def test_an_estimate_follows_a_tier_that_becomes_slower() -> None:
    estimate = Estimate()
    estimate.begin((1000, 0.011), (101_000, 1.011))
    assert estimate.rate == pytest.approx(1e5)
    assert estimate.latency == pytest.approx(0.001)
    for _ in range(40):
        estimate.observe(10_000, 0.001 + 1.0)
    assert estimate.rate == pytest.approx(1e4, rel=0.05)
    for _ in range(40):
        estimate.observe(10, 5.0)
    assert estimate.latency + 10 / estimate.rate == pytest.approx(5.0, rel=0.05)


def test_an_estimate_cuts_transfers_so_that_latency_does_not_rule_them() -> None:
    estimate = Estimate()
    estimate.begin((0, 0.1), (1000, 0.2))
    assert estimate.amount(0.05) == pytest.approx(4000)  # a fifth of the half second is latency
    assert estimate.amount(10.0) == pytest.approx(99_000)
