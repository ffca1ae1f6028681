"""The form of a stored block: its storage key, and a header that proves that what comes back is what was put.

It does not know tiers, nor how a block's bytes are laid out inside.

A record is one block of one KV group, little-endian: magic "AKVB", version (u16), length of the header (u16), length of
the payload (u64), storage key (32 bytes), XXH3-128 of header and payload (16 bytes), payload. The checksum finds faults
of disks and networks, not forgers: who may write to a tier is trusted with the text of those who read it.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import xxhash

from antiphon.actors.model import Facts, KVGroup
from antiphon.actors.pager import U8
from antiphon.actors.protocol import Configured

Payload: TypeAlias = bytes | memoryview | U8  # a block of a group, one row of bytes
MAGIC = b"AKVB"
VERSION = 1
_FIELDS = struct.Struct("<4sHHQ32s")
_SUM = 16
HEADER = _FIELDS.size + _SUM


class BadRecord(Exception):
    """Seen by the level that read it: bytes that are not the record that was put under this key."""


class Group(NamedTuple):
    """One KV group of a table. ``bytes``: of a block, as far as the group tells; a quantized one may take less."""

    digest: bytes
    target: bool
    bytes: int


class Layout:
    """Storage keys of a deployment's blocks, table by table."""

    def __init__(self, facts: Facts, pools: Configured):
        self.tables = [[Group(digest_of(facts, group, pools.block_size), group.owner == "target",
                              group.slot_bytes() * pools.block_size) for group in groups] for groups in pools.groups]
        # Per table the groups that a hit cannot do without: the target's; in a table without any, all.
        self.needed = [[g for g, group in enumerate(table) if group.target] or list(range(len(table)))
                       for table in self.tables]

    def keys(self, table: int, key: bytes) -> list[bytes]:
        """Storage keys of a block, one for each group of the table."""
        return [storage_key(group.digest, key) for group in self.tables[table]]

    def bytes(self, table: int) -> int:
        """Bytes of a block with its headers, all groups of the table."""
        return sum(group.bytes + HEADER for group in self.tables[table])


def digest_of(facts: Facts, group: KVGroup, block_size: int) -> bytes:
    """SHA-256 of all that gives a block's bytes their meaning: the owner's weights and every field of the group."""
    digest = hashlib.sha256(b"antiphon.kv.group.1")
    for field in ((facts.digest or facts.name).encode(), msgspec.json.encode(group), str(block_size).encode()):
        digest.update(len(field).to_bytes(8, "little") + field)
    return digest.digest()


def storage_key(group: bytes, key: bytes) -> bytes:
    """SHA-256 of a group's digest and a block key, both 32 bytes."""
    return storage_keys(group, [key])[0]


def storage_keys(group: bytes, keys: Sequence[bytes]) -> list[bytes]:
    """The same for many block keys: a prompt of 100,000 tokens has thousands."""
    beginning, sha256 = b"antiphon.kv.record.1" + group, hashlib.sha256
    return [sha256(beginning + key).digest() for key in keys]


def wrap(key: bytes, payload: Payload) -> bytes:
    """The record of a payload under a storage key."""
    view = payload.data.cast("B") if isinstance(payload, np.ndarray) else memoryview(payload)
    fields = _FIELDS.pack(MAGIC, VERSION, HEADER, len(view), key)
    return b"".join((fields, _checksum(fields, view), view))


def unwrap(key: bytes, record: bytes) -> memoryview:
    """The payload of a record. Raises BadRecord."""
    if len(record) < HEADER:
        raise BadRecord(f"{len(record)} bytes are less than a header")
    magic, version, header, length, found = _FIELDS.unpack_from(record)
    view = memoryview(record)
    if (magic, version, header) != (MAGIC, VERSION, HEADER):
        raise BadRecord("it is no record of this version")
    if found != key:
        raise BadRecord("it belongs to another key")
    if length != len(view) - HEADER:
        raise BadRecord(f"{len(view) - HEADER} of {length} bytes are there")
    if view[_FIELDS.size:HEADER] != _checksum(record[:_FIELDS.size], view[HEADER:]):
        raise BadRecord("its checksum differs")
    return view[HEADER:]


def _checksum(fields: bytes, payload: memoryview) -> bytes:
    digest = xxhash.xxh3_128(fields)
    digest.update(payload)
    return digest.digest()
