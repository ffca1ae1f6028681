"""One step: which rows of which sequences, the messages they become, and what the verdict makes of them.

It knows neither queues nor who receives the messages.
"""

import asyncio
from typing import Any, NamedTuple

from antiphon.actors.columns import pack, ramp, unpack
from antiphon.actors.pace import Pace
from antiphon.actors.policy import Length
from antiphon.actors.protocol import Commit, Draft, Drafted, Execute, Executed, Observe, Reserve, Verified, Verify
from antiphon.actors.sequences import Sequence

MOST_DRAFTS = 63  # with the row they hang on they fill the 64 bits of a tree's mask


class Part:
    """A sequence's rows in a step: ``count`` tokens from slot ``start``, then the drafts."""

    __slots__ = ("count", "last", "logit_row", "parents", "pending", "promised", "rows", "sequence", "start", "tokens")

    def __init__(self, sequence: Sequence, count: int):
        self.sequence = sequence
        self.start = sequence.planned
        self.count = count
        self.rows = count  # with drafts
        self.last = sequence.planned + count == sequence.total  # its last row predicts a new token
        self.pending = sequence.pending if self.last else None
        self.tokens: list[int] = []  # drafts
        self.parents: list[int] | None = None  # local to the drafts, -1: the last committed token; None: a chain
        self.logit_row = -1
        self.promised = False  # its token is pending until the step is verified

    def restart(self, hit: int) -> None:
        """Begin after ``hit`` slots that the prefix cache holds."""
        sequence = self.sequence
        self.start = hit
        self.count = self.rows = min(self.count, sequence.total - hit)
        self.last = hit + self.count == sequence.total
        self.pending = sequence.pending if self.last else None

    def draft(self, tokens: list[int], parents: list[int] | None) -> None:
        """Add drafts, or take them away."""
        self.tokens, self.parents = tokens, parents
        self.rows = self.count + len(tokens)


class Outcome(NamedTuple):
    """What a step leaves, by part: kept draft rows and committed ids. And what to emit, and who has ended how."""

    kept: list[list[int]]
    ids: list[list[int]]
    emitted: list[tuple[Sequence, int, list[int], str]]  # sequence, ids before, new ids, finish
    finished: list[tuple[Sequence, str]]


class Step:
    """A composed step. ``verified`` is the verifier's answer on its way, None if no row predicts anything."""

    def __init__(self, number: int, parts: list[Part]):
        self.number = number
        self.plain = False  # every part is one row without drafts: its columns need no loop
        self.keep(parts)
        self.executed: Executed | None = None
        self.verify: Verify | None = None
        self.verified: asyncio.Future[Verified] | None = None
        self.began = 0.0

    def keep(self, parts: list[Part]) -> None:
        """Go on with these parts only."""
        self.parts = parts
        self.predicting = [p for p in parts if p.last]  # their last row predicts a token
        self.handles = pack([p.sequence.handle for p in parts])

    @property
    def predicts(self) -> bool:
        """Whether there is something to verify."""
        return bool(self.predicting)

    def grant(self, handles: list[int], hits: list[int], granted: list[int]) -> None:
        """Sequences may use ``granted`` slots; of a newly opened one ``hits`` are there already."""
        parts = {p.sequence.handle: p for p in self.parts}
        for handle, hit, slots in zip(handles, hits, granted, strict=True):
            part = parts[handle]
            part.sequence.granted = slots
            if hit:  # at most total - 1: the last token is always computed
                part.sequence.computed = part.sequence.planned = hit
                part.restart(hit)
        if any(hits):
            self.keep(self.parts)

    def hold(self, handles: set[int]) -> None:
        """Leave out sequences whose beginning is on its way."""
        if handles:
            for part in self.parts:
                part.sequence.held = part.sequence.held or part.sequence.handle in handles
            self.keep([p for p in self.parts if p.sequence.handle not in handles])

    def work(self) -> tuple[int, int]:
        """Rows of prompts, and slots of context that these rows saw in all; none if rows of other kinds dominate."""
        rows = sum(p.count for p in self.parts)
        if rows < 2 * len(self.parts):
            return 0, 0
        return rows, sum(p.count * p.start + p.count * p.count // 2 for p in self.parts)

    def budgets(self, length: Length[Any], drafts: int, max_rows: int) -> list[int]:
        """Most drafts for each part that predicts, at most ``drafts``; with them the step stays within its rows."""
        parts = self.predicting
        room = max_rows - sum(p.count for p in self.parts)
        budgets = []
        for want, part in zip(length.budgets([p.sequence for p in parts], drafts), parts, strict=True):
            # A draft beyond the last token that may still be generated would be verified for nothing; one after a
            # token that is not known yet cannot be made.
            most = min(want, drafts, part.sequence.left - 1, MOST_DRAFTS, room)
            budgets.append(max(0, most) if part.count == 1 and not part.sequence.flight else 0)
            room -= budgets[-1]
        return budgets

    def draft(self, budgets: list[int]) -> Draft:
        """Ask for drafts for the parts that predict."""
        sequences = [p.sequence for p in self.predicting]
        offsets, ids = [0], []
        for sequence in sequences:
            if sequence.have < len(sequence.ids):
                ids += sequence.ids[sequence.have:]
            offsets.append(len(ids))
        return Draft(self.number, self._predicting(), pack([s.have for s in sequences]), pack(offsets), pack(ids),
                     pack(budgets))

    def take_drafts(self, drafted: Drafted) -> set[int]:
        """Put the drafts into their parts; the handles whose mirror the drafter has lost."""
        if not drafted.tokens and not drafted.lost:
            return set()
        lost = set(unpack(drafted.lost).tolist())
        offsets, tokens = unpack(drafted.offsets).tolist(), unpack(drafted.tokens).tolist()
        parents = unpack(drafted.parents).tolist() if drafted.parents else None
        for r, part in enumerate(self.predicting):
            if part.sequence.handle not in lost:
                part.sequence.have = len(part.sequence.ids)
                part.draft(tokens[offsets[r]:offsets[r + 1]],
                           parents[offsets[r]:offsets[r + 1]] if parents is not None else None)
        return lost

    def reserve(self, ahead: int, pace: Pace) -> Reserve | None:
        """Ask for slots if a sequence needs more than it was granted; ``ahead`` slots more are welcome then."""
        if all(p.start + p.rows <= p.sequence.granted for p in self.parts):
            return None
        parts = [p for p in self.parts if p.start + p.rows + ahead // 2 > p.sequence.granted]
        need = [p.start + p.rows for p in parts]
        # Never beyond the request's end: the executor's tables are as wide as the model's context.
        want = [max(n, min(n + ahead, p.sequence.end)) for n, p in zip(need, parts, strict=True)]
        return Reserve(self.number, pack([p.sequence.handle for p in parts]), pack(need), pack(want),
                       pace.row_s, pace.row_slot_s)

    def execute(self, changes: list[int], ticket: int, capture: tuple[str, ...], reduce: bool) -> Execute:
        """The rows for the executor; gives every predicting part its logit row."""
        self.plain = all(p.rows == 1 and p.last for p in self.parts)
        if self.plain:
            return self._execute_plain(changes, ticket, capture, reduce)
        ids: list[int] = []
        positions: list[int] = []
        parents: list[int] = []
        offsets: list[int] = [0]
        logit_rows: list[int] = []
        pending_step, tree = -1, any(p.parents is not None for p in self.parts)
        for part in self.parts:
            sequence, begin, start = part.sequence, len(ids), part.start
            known = sequence.ids[start:start + part.count]
            ids += known
            if len(known) < part.count:  # the last one is pending
                assert part.pending is not None
                pending_step, row = part.pending
                ids.append(-1 - row)
            positions += range(start, start + part.count)
            if tree:
                parents += range(-1, part.count - 1)
            if part.last:
                root = begin + part.count - 1
                part.logit_row = len(logit_rows)
                logit_rows += range(root, root + 1 + len(part.tokens))
                ids += part.tokens
                depth = positions[-1]
                if part.parents is None:
                    positions += range(depth + 1, depth + 1 + len(part.tokens))
                else:
                    for parent in part.parents:
                        positions.append((depth if parent < 0 else positions[root + 1 + parent]) + 1)
                if tree:
                    local = part.parents if part.parents is not None else range(-1, len(part.tokens) - 1)
                    parents += [part.count + parent for parent in local]
            offsets.append(len(ids))
        return Execute(
            self.number, self.handles, pack([p.start for p in self.parts]), pack(offsets), pack(ids),
            pack(positions), pack(parents) if tree else b"", pack(logit_rows), pack(changes), pending_step, ticket,
            capture, reduce, finish=not logit_rows,
        )

    def _execute_plain(self, changes: list[int], ticket: int, capture: tuple[str, ...], reduce: bool) -> Execute:
        rows = len(self.parts)
        ids, pending_step = [], -1
        for row, part in enumerate(self.parts):
            part.logit_row = row
            if part.start < len(part.sequence.ids):
                ids.append(part.sequence.ids[part.start])
            else:
                assert part.pending is not None
                pending_step, pending = part.pending
                ids.append(-1 - pending)
        starts = pack([p.start for p in self.parts])  # slots are positions
        return Execute(self.number, self.handles, starts, ramp(rows + 1), pack(ids), starts, b"", ramp(rows),
                       pack(changes), pending_step, ticket, capture, reduce)

    def rows(self) -> dict[str, int]:
        """Rows by tenant."""
        rows: dict[str, int] = {}
        for part in self.parts:
            tenant = part.sequence.tenant
            rows[tenant] = rows.get(tenant, 0) + part.rows
        return rows

    def to_verify(self, executed: Executed) -> Verify:
        """The predicting rows for the verifier."""
        if self.plain:
            rows = len(self.parts)
            return Verify(self.number, self.handles, pack([p.start + 1 for p in self.parts]), ramp(rows + 1),
                          bytes(4 * rows), b"", executed.logits, executed.frames)
        parts = self.predicting
        tree = any(p.parents is not None for p in parts)
        offsets, tokens, parents = [0], [], []
        for part in parts:
            tokens += [0, *part.tokens]
            if tree:
                local = part.parents if part.parents is not None else range(-1, len(part.tokens) - 1)
                parents += [-1, *(parent + 1 for parent in local)]
            offsets.append(len(tokens))
        return Verify(
            self.number, self._predicting(), pack([p.start + p.count for p in parts]),
            pack(offsets), pack(tokens), pack(parents) if tree else b"", executed.logits, executed.frames,
        )

    def launched(self, promise: bool) -> None:
        """Note in the sequences that the step is in flight; with ``promise`` tokens to come may be planned upon."""
        for part in self.parts:
            sequence = part.sequence
            sequence.flight += 1
            sequence.planned += part.count
            if promise and part.last and not part.tokens and sequence.total + 1 < sequence.end:
                sequence.pending = (self.number, part.logit_row)
                sequence.unknown += 1
                sequence.total += 1
                part.promised = True

    def apply(self, verified: Verified | None) -> Outcome:
        """Take the verdict into the sequences, in one go and without awaiting."""
        columns = [unpack(c).tolist() for c in (verified.offsets, verified.ids, verified.kept_offsets, verified.kept)] \
            if verified is not None else [[0], [], [0], []]
        offsets, all_ids, kept_offsets, all_kept = columns
        outcome = Outcome([], [], [], [])
        r = 0
        for part in self.parts:
            sequence = part.sequence
            sequence.flight -= 1
            rows: list[int] = []
            ids: list[int] = []
            if part.last:
                sequence.unknown -= part.promised
                if sequence.cancelled:  # its token is no one's; one planned ahead of its stop is cancelled too
                    sequence.total = len(sequence.ids) + sequence.unknown
                else:
                    index = len(sequence.ids) - sequence.prompt_length
                    ids, finish = sequence.append(all_ids[offsets[r]:offsets[r + 1]])
                    sequence.have = len(sequence.ids)
                    if part.tokens:
                        rows = all_kept[kept_offsets[r]:kept_offsets[r + 1]][:len(ids) - 1]
                    outcome.emitted.append((sequence, index, ids, finish))
                    if finish:
                        outcome.finished.append((sequence, finish))
                        sequence.cancelled = finish if sequence.flight else ""  # what is planned beyond is no one's
                r += 1
            sequence.computed = part.start + part.count + len(rows)
            if not sequence.flight:
                sequence.planned = sequence.computed
            outcome.kept.append(rows)
            outcome.ids.append(ids)
        return outcome

    def commit(self, kept: list[list[int]], ids: list[list[int]]) -> Commit:
        """What stays: per part the kept draft rows (local to the part's predicting row) and the committed ids.

        ``starts`` names the predicting row's slot, so that row i kept goes to ``start + i``.
        """
        committed = [i for new in ids for i in new]
        if self.plain and len(committed) == len(ids):
            count = len(ids)
            starts = [p.start for p in self.parts]
            return Commit(self.number, self.handles, pack(starts), bytes(4 * count + 4), b"", ramp(count + 1),
                          pack(committed), pack([start + 1 for start in starts]))
        kept_offsets, id_offsets = [0], [0]
        for rows, new in zip(kept, ids, strict=True):
            kept_offsets.append(kept_offsets[-1] + len(rows))
            id_offsets.append(id_offsets[-1] + len(new))
        return Commit(
            self.number, self.handles, pack([p.start + p.count - 1 for p in self.parts]), pack(kept_offsets),
            pack([row for rows in kept for row in rows]), pack(id_offsets), pack(committed),
            pack([p.start + p.count + len(rows) for p, rows in zip(self.parts, kept, strict=True)]),
        )

    def observe(self, kept: list[list[int]], ids: list[list[int]]) -> Observe:
        """Rows and the token that followed each, for a drafter that reads hidden states."""
        assert self.executed is not None
        offsets, following = [0], []
        for part, rows, new in zip(self.parts, kept, ids, strict=True):
            inner = part.sequence.ids[part.start + 1:part.start + part.count]
            after = [-1] * len(part.tokens)
            for row, token in zip(rows, new[1:], strict=False):
                after[row - 1] = token
            first = new[:1] or part.sequence.ids[part.start + part.count:part.start + part.count + 1] or [-1]
            following += [*inner, *first, *after]
            offsets.append(len(following))
        return Observe(self.number, self.handles, pack(offsets), self.executed.hidden, pack(following))

    def _predicting(self) -> bytes:
        """Handles of the parts that predict."""
        if len(self.predicting) == len(self.parts):
            return self.handles
        return pack([p.sequence.handle for p in self.predicting])
