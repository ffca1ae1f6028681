"""One step: which rows of which sequences, and the messages they become.

It knows neither queues nor who receives the messages.
"""

import asyncio

from antiphon.actors.columns import pack, unpack
from antiphon.actors.protocol import Commit, Draft, Drafted, Execute, Executed, Observe, Reserve, Verified, Verify
from antiphon.actors.sequences import Sequence


class Part:
    """A sequence's rows in a step: ``count`` tokens from slot ``start``, then the drafts."""

    __slots__ = ("count", "last", "logit_row", "parents", "pending", "promised", "sequence", "start", "tokens")

    def __init__(self, sequence: Sequence, count: int):
        self.sequence = sequence
        self.start = sequence.planned
        self.count = count
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
        self.count = min(self.count, sequence.total - hit)
        self.last = hit + self.count == sequence.total
        self.pending = sequence.pending if self.last else None

    @property
    def rows(self) -> int:
        """Rows with drafts."""
        return self.count + len(self.tokens)


class Step:
    """A composed step. ``verified`` is the verifier's answer on its way, None if no row predicts anything."""

    def __init__(self, number: int, parts: list[Part]):
        self.number = number
        self.parts = parts
        self.executed: Executed | None = None
        self.verify: Verify | None = None
        self.verified: asyncio.Future[Verified] | None = None
        self.began = 0.0

    @property
    def predicting(self) -> list[Part]:
        """Parts whose last row predicts a token."""
        return [p for p in self.parts if p.last]

    def draft(self, budgets: list[int]) -> Draft:
        """Ask for drafts for the parts that predict."""
        parts = self.predicting
        offsets, ids = [0], []
        for part in parts:
            ids += part.sequence.ids[part.sequence.have:]
            offsets.append(len(ids))
        return Draft(self.number, pack([p.sequence.handle for p in parts]), pack([p.sequence.have for p in parts]),
                     pack(offsets), pack(ids), pack(budgets))

    def take_drafts(self, drafted: Drafted) -> set[int]:
        """Put the drafts into their parts; the handles whose mirror the drafter has lost."""
        lost = set(unpack(drafted.lost).tolist())
        offsets, tokens = unpack(drafted.offsets).tolist(), unpack(drafted.tokens).tolist()
        parents = unpack(drafted.parents).tolist() if drafted.parents else None
        for r, part in enumerate(self.predicting):
            if part.sequence.handle not in lost:
                part.sequence.have = len(part.sequence.ids)
                part.tokens = tokens[offsets[r]:offsets[r + 1]]
                part.parents = parents[offsets[r]:offsets[r + 1]] if parents is not None else None
        return lost

    def reserve(self, ahead: int) -> Reserve | None:
        """Ask for slots if a sequence needs more than it was granted; ``ahead`` slots more are welcome then."""
        if all(p.start + p.rows <= p.sequence.granted for p in self.parts):
            return None
        parts = [p for p in self.parts if p.start + p.rows + ahead // 2 > p.sequence.granted]
        need = [p.start + p.rows for p in parts]
        want = [n + min(ahead, max(0, p.sequence.left)) for n, p in zip(need, parts, strict=True)]
        return Reserve(self.number, pack([p.sequence.handle for p in parts]), pack(need), pack(want))

    def execute(self, changes: list[int], ticket: int, capture: tuple[str, ...], reduce: bool) -> Execute:
        """The rows for the executor; gives every predicting part its logit row."""
        ids: list[int] = []
        positions: list[int] = []
        parents: list[int] = []
        offsets, logit_rows = [0], []
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
            self.number, self._handles(), pack([p.start for p in self.parts]), pack(offsets), pack(ids),
            pack(positions), pack(parents) if tree else b"", pack(logit_rows), pack(changes), pending_step, ticket,
            capture, reduce, finish=not logit_rows,
        )

    def to_verify(self, executed: Executed) -> Verify:
        """The predicting rows for the verifier."""
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
            self.number, pack([p.sequence.handle for p in parts]), pack([p.start + p.count for p in parts]),
            pack(offsets), pack(tokens), pack(parents) if tree else b"", executed.logits, executed.frames,
        )

    def commit(self, kept: list[list[int]], ids: list[list[int]]) -> Commit:
        """What stays: per part the kept draft rows (local to the part's predicting row) and the committed ids.

        ``starts`` names the predicting row's slot, so that row i kept goes to ``start + i``.
        """
        kept_offsets, id_offsets = [0], [0]
        for rows, new in zip(kept, ids, strict=True):
            kept_offsets.append(kept_offsets[-1] + len(rows))
            id_offsets.append(id_offsets[-1] + len(new))
        return Commit(
            self.number, self._handles(), pack([p.start + p.count - 1 for p in self.parts]), pack(kept_offsets),
            pack([row for rows in kept for row in rows]), pack(id_offsets), pack([i for new in ids for i in new]),
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
        return Observe(self.number, self._handles(), pack(offsets), self.executed.hidden, pack(following))

    def _handles(self) -> bytes:
        return pack([p.sequence.handle for p in self.parts])
