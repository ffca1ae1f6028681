"""Block keys: each field counts, no field stands for another, and the secret is nobody else's."""

import hashlib
from itertools import combinations
from pathlib import Path

import pytest

from antiphon.actors.columns import pack
from antiphon.actors.keys import chain, root, salt, secret_at


def test_every_field_makes_another_root() -> None:
    salts = [salt(b"s" * 32, "ada"), salt(b"s" * 32, "bob"), salt(b"t" * 32, "ada")]
    roots = [root("model", "", s) for s in salts]
    roots += [root("model", "adapter", salts[0]), root("modela", "dapter", salts[0]), root("", "model", salts[0])]
    assert all(a != b for a, b in combinations(roots, 2))


def test_a_key_says_all_tokens_before_it_and_its_own() -> None:
    start = root("model", "", b"salt")
    keys = chain(start, pack(range(12)), 16)
    assert keys == chain(start, pack(range(13)), 16)  # full blocks only
    assert chain(keys[0], pack(range(4, 12)), 16) == keys[1:]
    assert chain(start, pack([9, *range(1, 12)]), 16)[2] != keys[2]
    assert chain(start, pack(range(12)), 8)[1] != keys[0]  # a block of another size ends at the same token
    assert len({*keys, *chain(start, pack(range(12)), 8)}) == 3 + 6


def test_keys_are_what_is_written_down() -> None:
    """They lie on disks and in shared stores: a change of the layout needs a new number in the domain tag."""
    field = b"".join(len(v).to_bytes(8, "little") + v for v in (b"m", b"", b"s"))
    start = hashlib.sha256(b"antiphon/kv/root/1" + field).digest()
    assert root("m", "", b"s") == start
    ids = pack([1, 2])
    block = b"antiphon/kv/block/1" + start + (8).to_bytes(8, "little") + ids
    assert chain(start, ids, 8) == [hashlib.sha256(block).digest()]


def test_a_secret_is_made_once_and_read_by_its_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "secret"
    made = secret_at(str(file))
    assert len(made) == 32
    assert secret_at(str(file)) == made
    assert [p.name for p in file.parent.iterdir()] == ["secret"]
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        secret_at(str(file))
    file.chmod(0o600)
    file.write_bytes(b"short")
    with pytest.raises(ValueError, match="5 bytes, not 32"):
        secret_at(str(file))
