"""docs/features.md is what the tests' markers say, and no pair of features is without a test or a refusal."""

from itertools import combinations_with_replacement

from tests.features import REFUSED, TABLE, Feature, shown, table


def test_every_pair_of_features_is_shown_or_refused() -> None:
    found = shown()
    pairs = [frozenset(p) for p in combinations_with_replacement(Feature, 2)]
    empty = [" with ".join(sorted(p)) for p in pairs if p not in found and p not in REFUSED]
    assert not empty, f"no test shows: {empty}"


def test_the_table_is_up_to_date() -> None:
    assert TABLE.read_text(encoding="utf-8") == table(), "run: python tests/features.py"
