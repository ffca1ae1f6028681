"""The vocabulary of the actors: every message of the request lane, the step lane and the start, in one place.

Read this first. Columns are immutable bytes of packed little-endian int32 (columns.py); R sequences, N rows.
A *sequence* is a dense index with a generation in one int32 (columns.sequence); request ids appear only on the
request lane, in ``Open`` and in ``Emit``. It does not know who decides what the messages say.
"""

from typing import Any

import msgspec

from antiphon.actors.model import Facts, KVGroup
from antiphon.runtime.message import Buffer, Message

Column = bytes  # packed int32


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How tokens are chosen, and how the request is served.

    ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 cut nothing. A higher ``priority`` is served first and
    gives way last. ``cache`` false: neither reads the prefix cache nor leaves anything in it.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    priority: int = 0
    cache: bool = True


# ---- request lane: gateway <-> tokenizer <-> scheduler


class Generate(Message, frozen=True):
    """gateway -> tokenizer. Exactly one of ``text`` and ``ids`` is given; ``raw`` text skips the chat template."""

    request: bytes  # 16 random bytes, bound to the client
    tenant: str
    text: str | None
    ids: Column | None
    raw: bool
    sampling: Sampling
    seed: int  # effective seed, drawn by the gateway when the caller gave none
    sample: int = 0
    like: bytes = b""  # request with the same prompt, of which this is another sample: it may share what that computed


class Accepted(Message, frozen=True):
    """tokenizer -> gateway, before ``Admit`` goes to the scheduler."""

    request: bytes
    ids: Column  # of the prompt


class Resume(Message, frozen=True):
    """gateway -> tokenizer: a replay or a client that comes back; takes the path of Generate without tokenizing.

    For an id that still runs it takes the request over and re-sends the output after ``ids``.
    """

    request: bytes
    tenant: str
    prompt: Column
    ids: Column  # generated so far, as the sender knows it
    sampling: Sampling
    seed: int
    sample: int = 0


class Admit(Message, frozen=True):
    """tokenizer -> scheduler."""

    request: bytes
    tenant: str
    ids: Column  # prompt and what was generated before
    prompt_length: int
    sampling: Sampling
    seed: int
    sample: int = 0
    like: bytes = b""


class Emit(Message, frozen=True):
    """scheduler -> tokenizer, one per step: new ids of several requests, ``finish`` "" while a request runs."""

    requests: tuple[bytes, ...]
    index: Column  # [R] how many ids were generated before the first one here
    offsets: Column  # [R + 1]
    ids: Column
    finish: tuple[str, ...]  # "", "stop", "length", "cancelled", "error"


class Delta(Message, frozen=True):
    """tokenizer -> gateway, one per step: the same with text beside the ids."""

    requests: tuple[bytes, ...]
    index: Column
    offsets: Column
    ids: Column
    texts: tuple[str, ...]
    finish: tuple[str, ...]


class Cancel(Message, frozen=True):
    """gateway -> tokenizer -> scheduler, control lane; idempotent, valid in every state."""

    request: bytes
    reason: str = "cancelled"


class Refuse(Message, frozen=True):
    """scheduler -> tokenizer -> gateway: the request will not be served. ``kind`` is one of door errors' kinds."""

    request: bytes
    kind: str
    reason: str
    retry_after: float = 0.0  # seconds; 0: trying again does not help


# ---- start: the scheduler introduces the step's actors to the model


class Described(Message, frozen=True):
    """Answers Describe. ``device``: logits stay on a device table of this cell."""

    facts: Facts


class Describe(Message, frozen=True):
    """scheduler -> executor."""

    reply = Described


class Configured(Message, frozen=True):
    """Answers Configure: the KV memory's layout. Groups that keep the whole context share table 0."""

    block_size: int
    blocks: tuple[int, ...]  # per table
    groups: tuple[tuple[KVGroup, ...], ...]  # per table
    shares: bool = False  # a sequence's beginning may be there already


class Configure(Message, frozen=True):
    """scheduler -> allocator."""

    facts: Facts
    reply = Configured


class Loaded(Message, frozen=True):
    """Answers Load: weights are read, pools allocated."""

    seconds: float


class Load(Message, frozen=True):
    """scheduler -> executor."""

    pools: Configured
    reply = Loaded


class Prepared(Message, frozen=True):
    """Answers Prepare.

    A drafter says how many tokens it drafts at most (0: never), its ``lag`` (0: needs the tokens of the step
    before, 1: does not), whether it wants Observe and which hidden states. A verifier says whether it reads
    logits through the device table (``device``) or needs them as frames.
    """

    most: int = 0
    lag: int = 1
    observes: bool = False
    capture: tuple[str, ...] = ()
    device: bool = False
    tree: bool = False


class Prepare(Message, frozen=True):
    """scheduler -> drafter, verifier, pager."""

    facts: Facts
    reply = Prepared


# ---- step lane


class Handle(msgspec.Struct, frozen=True, array_like=True):
    """A value in a device table, valid until the Commit of its step."""

    cell: str
    epoch: int
    slot: int
    generation: int


class Open(Message, frozen=True):
    """scheduler -> allocator, executor, drafter, verifier (tell): also after preemption, replay and Resume."""

    sequence: int
    request: bytes
    tenant: str
    sample: int
    ids: Column  # prompt and generated so far
    prompt_length: int
    sampling: Sampling
    seed: int
    source: int = -1  # sequence of which it shares the first ``shared`` KV slots; -1: none
    shared: int = 0


class Drafted(Message, frozen=True):
    """Answers Draft. Local parents: -1 is the last committed token; a parent comes before its child."""

    offsets: Column  # [R + 1]
    tokens: Column
    parents: Column  # empty: chains
    scores: bytes = b""  # float32 confidences; never look at the token they rate
    q: Handle | None = None  # what the tokens were drawn from; None: one-hot
    lost: Column = b""  # sequences whose mirror is unknown: to be opened anew


class Draft(Message, frozen=True):
    """scheduler -> drafter."""

    step: int
    sequences: Column  # [R]
    have: Column  # [R] length of the mirror that the scheduler assumes
    offsets: Column  # [R + 1] into ids
    ids: Column  # committed since the mirror's length
    budgets: Column  # [R] most tokens wanted
    reply = Drafted


class Reserved(Message, frozen=True):
    """Answers Reserve. A sequence that is ``short`` or ``waits`` got nothing new.

    One that waits is told ready by ``Ready``: its beginning is being computed by another sequence, or brought from a
    tier.
    """

    hits: Column  # [R] KV slots found in the prefix cache for a newly opened sequence, else 0
    granted: Column  # [R] slots the sequence may now use
    changes: Column  # quadruples (sequence, table, index, block)
    moves: Column  # quadruples (COPY, SAVE or LOAD, table, block, place), see ``Page``; empty: nothing moves
    short: Column  # sequences
    waits: Column = b""  # sequences
    keys: bytes = b""  # 32 bytes each: block keys that moves name
    available: int = 0  # blocks that every table could still give


class Reserve(Message, frozen=True):
    """scheduler -> allocator."""

    step: int
    sequences: Column  # [R]
    need: Column  # [R] KV slots in all that the step needs
    want: Column  # [R] what would be welcome, so that later steps need not ask
    row_s: float = 0.0  # measured seconds to compute one row of a prompt; 0: not measured yet
    row_slot_s: float = 0.0  # and for each slot of context before it
    reply = Reserved


class Ready(Message, frozen=True):
    """allocator -> scheduler (tell): sequences that waited can go on; Reserve for them is answered with their hit."""

    sequences: Column


class Paged(Message, frozen=True):
    """Answers Page: the executor waits for the ticket before it reads what moves."""

    ticket: int


COPY, SAVE, LOAD = range(3)  # what a move does


class Page(Message, frozen=True):
    """scheduler -> pager, between Reserve and Execute; only if blocks move.

    Quadruples (what, table, block, place). COPY: the device block ``block`` onto the device block ``place``, all groups
    of the table. SAVE: the device block under key number ``place``, before anyone writes it again. LOAD: key number
    ``place`` into the device block; ``Arrived`` tells when. When Paged comes, copies and reads of saved blocks are
    queued on the device before any later step; loads may take their time.
    """

    step: int
    moves: Column
    keys: bytes = b""  # 32 bytes each
    reply = Paged


# ---- tiers: allocator <-> pager


class Mount(Message, frozen=True):
    """allocator -> pager (tell), at the start and when the pager is back: the pools whose blocks it will move."""

    facts: Facts
    pools: Configured


class Mounted(Message, frozen=True):
    """pager -> allocator (tell): tiers are there (``holds``).

    ``through``: blocks are wanted once they are full; ``back``: evicted ones are wanted even if they were stored.
    """

    holds: bool
    through: bool = False
    back: bool = False


class Find(Message, frozen=True):
    """allocator -> pager (tell): which of a sequence's blocks do tiers hold?"""

    sequence: int
    keys: bytes  # 32 bytes each, in the order of the blocks


class Found(Message, frozen=True):
    """pager -> allocator (tell): answers Find, at the latest when the pager's deadline for look-ups has passed."""

    sequence: int
    present: Column  # [tables * keys] 1: every target group of the table can be brought
    latency: float = 0.0  # seconds before the first byte comes, queueing included
    rate: float = 0.0  # bytes per second after that


class Arrived(Message, frozen=True):
    """pager -> allocator (tell): loads have ended. A bad one (0) left the block as it was, or half written."""

    tables: Column
    blocks: Column
    good: Column


class Store(Message, frozen=True):
    """allocator -> pager (tell): write these full blocks through. They are held until Stored; moves are all SAVE."""

    moves: Column
    keys: bytes


class Stored(Message, frozen=True):
    """pager -> allocator (tell): the blocks have been read from the device (or given up) and may be let go."""

    tables: Column
    blocks: Column


class Executed(Message, frozen=True):
    """Answers Execute: at once with handles, or with ``frames`` of reduced logits once they are computed."""

    logits: Handle | None
    hidden: dict[str, Handle]
    frames: tuple[Buffer, ...] = ()


class Execute(Message, frozen=True):
    """scheduler -> executor. Local row i of a sequence writes KV slot ``starts + i``.

    An id -(1 + row) is pending: the token chosen at logit row ``row`` of step ``pending_step``.
    """

    step: int
    sequences: Column  # [R]
    starts: Column  # [R] KV slots valid before this step
    row_offsets: Column  # [R + 1]
    ids: Column  # [N]
    positions: Column  # [N]
    parents: Column  # [N] local row of the parent, -1 for a sequence's first row; empty: all rows are chains
    logit_rows: Column  # [L]
    changes: Column  # block-table changes since the last Execute
    pending_step: int = -1
    ticket: int = 0
    capture: tuple[str, ...] = ()
    reduce: bool = False  # logits leave the cell: cut them to what the verifier needs
    finish: bool = False  # answer only when the rows are computed (nothing will be verified)
    reply = Executed


class Observed(Message, frozen=True):
    """Answers Observe: the drafter's stage is queued, so the handles may go."""


class Observe(Message, frozen=True):
    """scheduler -> drafter: every prefill chunk and every verified step."""

    step: int
    sequences: Column
    row_offsets: Column
    hidden: dict[str, Handle]
    next_ids: Column  # [N] the token that followed each row; -1 for a rejected row
    reply = Observed


class Verified(Message, frozen=True):
    """Answers Verify."""

    offsets: Column  # [R + 1] into ids
    ids: Column  # accepted drafts and the token after them
    kept_offsets: Column  # [R + 1] into kept
    kept: Column  # local rows whose KV stays, row 0 not named


class Verify(Message, frozen=True):
    """scheduler -> verifier. Row 0 of a sequence is its last committed token, the others are drafts."""

    step: int
    sequences: Column  # [R]
    positions: Column  # [R] absolute position of the token that row 0 predicts
    offsets: Column  # [R + 1] into the logit rows
    tokens: Column  # [L] the row's own token; of row 0 it is not read
    parents: Column  # [L] local; -1 for row 0; empty: chains
    logits: Handle | None
    frames: tuple[Buffer, ...] = ()
    q: Handle | None = None
    reply = Verified


class Commit(Message, frozen=True):
    """scheduler -> allocator, executor, drafter (tell): what stays of a step. Handles of the step end here."""

    step: int
    sequences: Column  # [R]
    starts: Column  # [R] KV slot of the sequence's first row in the step
    kept_offsets: Column  # [R + 1]
    kept: Column  # local rows after row 0 that stay, in order; they are moved into line
    offsets: Column  # [R + 1]
    ids: Column  # committed ids
    lengths: Column  # [R] KV slots valid now


class Fork(Message, frozen=True):
    """scheduler -> all holders of sequence state (tell): ``sequence`` begins as a copy of ``source``."""

    sequence: int
    source: int
    sample: int
    length: int = -1  # KV slots shared; -1: all that are valid
    ids: Column = b""  # of the fork so far; empty: what it computes does not enter the prefix cache


class Close(Message, frozen=True):
    """scheduler -> all holders of sequence state (tell)."""

    sequences: Column
    reason: str  # "finished", "cancelled", "preempted"


# ---- operation


class Report(Message, frozen=True):
    """Answers Inspect: what an actor says of itself, as plain data."""

    facts: dict[str, Any]


class Inspect(Message, frozen=True):
    """Ask an actor (and, through it, those it uses) for its facts."""

    reply = Report


class Encoded(Message, frozen=True):
    """Answers Encode. ``problem`` says why there are no ids."""

    ids: Column
    problem: str = ""


class Encode(Message, frozen=True):
    """Ask the tokenizer for a prompt's ids; ``raw`` text skips the chat template."""

    text: str
    raw: bool
    reply = Encoded


class Pinned(Message, frozen=True):
    """Answers Pin: its number, and how many slots of the prefix are kept. ``problem`` says why there are none."""

    pin: int
    slots: int
    problem: str = ""


class Pin(Message, frozen=True):
    """Ask the allocator to keep what it has of a prefix on the device for some seconds, whoever uses it."""

    owner: str  # who asks, for the ledger
    tenant: str
    ids: Column
    seconds: float
    reply = Pinned


class Unpinned(Message, frozen=True):
    """Answers Unpin: whether there was such a pin."""

    found: bool


class Unpin(Message, frozen=True):
    """Ask the allocator to let a pin go."""

    pin: int
    reply = Unpinned


class Flushed(Message, frozen=True):
    """Answers Flush: blocks that are free now, per table."""

    blocks: Column


class Flush(Message, frozen=True):
    """Ask the allocator to forget every cached block that nobody holds."""

    reply = Flushed


class Pool(msgspec.Struct, frozen=True):
    """One block table's pool, in blocks. ``waste``: slots in active blocks that hold nothing a sequence can read."""

    groups: tuple[str, ...]
    total: int
    free: int
    active: int
    cached: int
    transfer: int
    quarantined: int
    waste: int


class Prefix(msgspec.Struct, frozen=True):
    """A prefix in the cache: the beginning of its last block's key in hex, its slots, hits, seconds since the last."""

    key: str
    slots: int
    hits: int
    age: float


class Surveyed(Message, frozen=True):
    """Answers Survey. ``pins``: number -> "owner: blocks, seconds left"."""

    block_size: int
    pools: tuple[Pool, ...]
    counters: dict[str, int]
    prefixes: tuple[Prefix, ...]
    pins: dict[int, str]


class Survey(Message, frozen=True):
    """Ask the allocator for what ``antiphon cache`` shows; the ``top`` prefixes by hits."""

    top: int = 10
    reply = Surveyed
