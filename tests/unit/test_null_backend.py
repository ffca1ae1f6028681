"""The null backend: windows whose blocks were let go, and rows that take their time."""

from typing import Any

import numpy as np
import pytest

from antiphon.actors.executor import Batch
from antiphon.actors.model import ModelSection
from antiphon.plugins.backends import null
from antiphon.plugins.backends.alone import Bare, pools
from antiphon.plugins.backends.null import Null, NullOptions, expected

SIZE, WINDOW, LENGTH = 4, 10, 30
PARENTS = [-1, 0, 0, 1, 2]


def loaded(**options: Any) -> Null:
    backend = Null(NullOptions(window=WINDOW, **options), Bare(ModelSection()))
    backend.load(pools(backend.facts(), 16, SIZE))
    return backend


def batch(ids: list[int], start: int, tables: tuple[Any, ...], parents: list[int] | None = None) -> Batch:
    n = len(ids)
    depths = [0] * n
    for i, parent in enumerate(parents or ()):
        depths[i] = 0 if parent < 0 else depths[parent] + 1
    positions = np.arange(n) if parents is None else np.array(depths)
    return Batch(
        np.zeros(1, np.int32), np.array([start], np.int32), np.array([0, n], np.int32), np.array(ids, np.int32),
        (start + positions).astype(np.int32), None if parents is None else np.array(parents, np.int32), tables,
        np.arange(n, dtype=np.int32),
    )


def slid(backend: Null, entry: int) -> tuple[Any, ...]:
    """Tables after LENGTH tokens whose window has moved on: ``entry`` stands before it, and its blocks hold others'."""
    whole = np.arange(16, dtype=np.int32)[None]
    backend.execute(batch(list(range(LENGTH)), 0, (whole, whole)))
    window = whole.copy()
    gone = (LENGTH + 1 - WINDOW) // SIZE
    backend.pools[1][:, :gone] = 999
    backend.hashes[1][:gone] = null.mix(backend.pools[1][0, :gone])
    window[0, :gone] = entry
    return whole, window


@pytest.mark.parametrize("entry", [-1, 3])
@pytest.mark.parametrize("parents", [None, PARENTS])
def test_what_lies_before_the_window_is_not_looked_at(entry: int, parents: list[int] | None) -> None:
    backend = loaded()
    tables = slid(backend, entry)
    ids = [100, 101, 102, 103, 104]
    logits = backend.execute(batch(ids, LENGTH, tables, parents)).logits
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]] if parents else [list(range(i + 1)) for i in range(5)]
    for row, path in enumerate(paths):
        seen = np.array([*range(LENGTH), *(ids[i] for i in path)])
        assert (logits[row] == expected(seen, backend.options)).all()


@pytest.mark.parametrize("parents", [None, PARENTS])
def test_a_window_s_block_that_is_missing_is_an_error(parents: list[int] | None) -> None:
    backend = loaded()
    tables = slid(backend, -1)
    tables[1][0, (LENGTH + 1 - WINDOW) // SIZE] = -1
    with pytest.raises(LookupError, match="no block"):
        backend.execute(batch([1, 2, 3, 4, 5], LENGTH, tables, parents))


def test_rows_of_prompts_take_the_time_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(null.time, "sleep", slept.append)
    tables = (np.arange(16, dtype=np.int32)[None],) * 2
    backend = loaded(prefill_row_s=0.5, step_seconds=0.25)
    backend.execute(batch(list(range(8)), 0, tables))
    backend.execute(batch([1], 8, tables))
    loaded().execute(batch(list(range(8)), 0, tables))
    assert slept == [0.25 + 8 * 0.5, 0.25]
