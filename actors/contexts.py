"""What the allocator knows of a sequence beside its blocks: its ids and their keys, and what it waits for.

It does not know how a hit is chosen.
"""

from antiphon.actors import keys
from antiphon.actors.index import Bools


class Context:
    """One open sequence. It has ``begun`` when it was first granted slots.

    A sequence that waits has an ``asker``, who is told Ready, and a monotonic second ``until`` which it waits at most:
    for tiers to be looked up (``finding``), for blocks on their way (``loading``), or for another sequence.
    """

    __slots__ = ("asker", "begun", "cached", "finding", "forked", "hit", "ids", "keys", "latency", "loaded", "loading",
                 "owner", "present", "published", "rate", "resolute", "root", "sequence", "total", "until")

    def __init__(self, sequence: int, owner: str, root: bytes, ids: bytes, block_bytes: int, cached: bool,
                 known: list[bytes] | None = None):
        self.sequence = sequence
        self.owner = owner
        self.root = root  # key before the first block
        self.total = len(ids) // 4
        self.cached = cached  # takes part in the prefix cache
        self.ids = ids
        self.keys = list(known or ())  # of full blocks; generated ones join when they are full
        if cached:
            done = len(self.keys)
            self.keys += keys.chain(self.keys[-1] if done else root, ids[done * block_bytes:], block_bytes)
        self.begun = False
        self.forked = False  # its blocks are its source's: they are in the hold before it begins
        self.hit = 0  # slots found
        self.loaded = 0  # blocks that came from a tier
        self.published = 0  # full blocks that are in the index, or were offered to it
        self.asker = ""
        self.until = 0.0
        self.finding = False
        self.loading = 0  # blocks
        self.present: list[Bools] | None = None  # per table, whether tiers have the block of each key
        self.latency = self.rate = 0.0
        self.resolute = False  # waits for no other sequence any more: it may hold claims, or has waited too long

    def key_before(self, block: int) -> bytes:
        """Key that the given block goes on from."""
        return self.keys[block - 1] if block else self.root
