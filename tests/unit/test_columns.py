"""Columns are packed int32; a sequence is an index and a generation in one of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.actors.columns import INDEX_BITS, index_of, indexes, pack, ramp, sequence, unpack

INT32 = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(INT32))
def test_what_is_packed_is_unpacked(values: list[int]) -> None:
    column = pack(values)
    assert len(column) == 4 * len(values)
    assert unpack(column).tolist() == values
    assert pack(unpack(column)) == pack(iter(values)) == column


def test_columns_are_little_endian_and_read_only() -> None:
    assert pack([1, -1]) == b"\x01\0\0\0\xff\xff\xff\xff"
    with pytest.raises(ValueError, match="read-only"):
        unpack(pack([1]))[0] = 2


def test_what_is_no_column_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple"):
        unpack(b"abc")
    with pytest.raises(OverflowError):
        pack([1 << 31])


@given(st.integers(0, (1 << INDEX_BITS) - 1), st.integers(0, 1 << 40))
def test_a_sequence_is_a_non_negative_int32_that_names_its_index(index: int, generation: int) -> None:
    handle = sequence(index, generation)
    assert 0 <= handle < 2**31
    assert index_of(handle) == index
    assert indexes(unpack(pack([handle, handle]))).tolist() == [index, index]


@pytest.mark.parametrize("count", [0, 1, 7, 5000])
def test_a_ramp_counts_from_zero(count: int) -> None:
    assert unpack(ramp(count)).tolist() == np.arange(count).tolist()
