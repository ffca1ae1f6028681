"""The drafter guesses what comes next; it owns mirrors of token ids and whatever its method indexes.

It does not know whether its guesses are accepted until Commit says so, nor how they are verified.
"""

import struct
from typing import Any, ClassVar, NamedTuple

from antiphon.actors.columns import index_of, pack, unpack
from antiphon.actors.protocol import (
    Close,
    Commit,
    Draft,
    Drafted,
    Fork,
    Inspect,
    Observe,
    Observed,
    Open,
    Prepare,
    Prepared,
    Report,
)
from antiphon.runtime.actor import Actor, ActorSite
from antiphon.runtime.plugin import O, Options, Plugin


class Sequence:
    """A sequence as a drafter sees it: all its committed ids. ``state`` is the method's own."""

    __slots__ = ("handle", "ids", "prompt_length", "state")

    def __init__(self, handle: int, ids: list[int], prompt_length: int):
        self.handle = handle
        self.ids = ids
        self.prompt_length = prompt_length
        self.state: Any = None


class Proposal(NamedTuple):
    """Drafted tokens. ``parents`` are local (-1: the last committed token); None: a chain."""

    tokens: list[int]
    parents: list[int] | None = None
    scores: list[float] | None = None


EMPTY = Proposal([])


class Drafter(Plugin[O]):
    """Contract of a ``drafter``. ``most`` is the number of tokens it can draft, ``lag`` as in ``Prepared``."""

    kind: ClassVar[str] = "drafter"
    most: int = 64
    lag: ClassVar[int] = 0
    tree: ClassVar[bool] = False

    def propose(self, sequence: Sequence, k: int) -> Proposal:
        """At most ``k`` tokens that may follow ``sequence.ids``."""
        raise NotImplementedError

    def close(self, sequence: Sequence) -> None:
        """The sequence is gone; drop what the method keeps of it."""


class DrafterOptions(Options, frozen=True):
    """The drafter actor has no options of its own."""


class DrafterActor(Actor[DrafterOptions]):
    """Hosts a drafting method: keeps the mirrors and asks the method sequence by sequence."""

    kind = "drafter"
    plugs = ("drafter",)
    stand_in = "plain"

    def __init__(self, options: DrafterOptions, site: ActorSite):
        super().__init__(options, site)
        self.method: Drafter[Any] = site.plugin("drafter")
        self.mirrors: dict[int, Sequence] = {}
        self.vocabulary = 0

    @classmethod
    def crossing(cls, kind: str, options: dict[str, Any], sections: dict[str, Any]) -> str:
        """The scheduler's edge to a drafter elsewhere carries ids only."""
        return "per sequence and step: 4 bytes for each committed and each drafted token"

    def on_prepare(self, message: Prepare) -> Prepared:
        """Say what the method needs."""
        self.vocabulary = message.facts.vocabulary
        return Prepared(most=self.method.most, lag=self.method.lag, tree=self.method.tree)

    def on_open(self, message: Open) -> None:
        """Begin a mirror, or begin it anew."""
        if not self.method.most:
            return
        self._drop(message.sequence)
        self.mirrors[message.sequence] = Sequence(message.sequence, unpack(message.ids).tolist(), message.prompt_length)

    def on_fork(self, message: Fork) -> None:
        """Copy a mirror."""
        source = self.mirrors[message.source]
        self.mirrors[message.sequence] = Sequence(message.sequence, list(source.ids), source.prompt_length)

    def on_draft(self, message: Draft) -> Drafted:
        """Bring the mirrors up to date and ask the method where there is a budget."""
        new, new_offsets = unpack(message.ids), unpack(message.offsets)
        offsets: list[int] = [0]
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        lost: list[int] = []
        tree = scored = False
        columns = zip(unpack(message.sequences).tolist(), unpack(message.have).tolist(),
                      unpack(message.budgets).tolist(), strict=True)
        for r, (handle, have, budget) in enumerate(columns):
            mirror = self.mirrors.get(handle)
            if mirror is None or len(mirror.ids) != have:
                lost.append(handle)
            else:
                mirror.ids.extend(new[new_offsets[r]:new_offsets[r + 1]].tolist())
                if budget > 0:
                    draft = self._propose(mirror, budget)
                    tokens += draft.tokens
                    count = len(draft.tokens)
                    tree = tree or draft.parents is not None
                    parents += draft.parents if draft.parents is not None else range(-1, count - 1)
                    scored = scored or draft.scores is not None
                    scores += draft.scores or [0.0] * count
            offsets.append(len(tokens))
        packed = struct.pack(f"<{len(scores)}f", *scores) if scored else b""
        return Drafted(pack(offsets), pack(tokens), pack(parents) if tree else b"", packed, None, pack(lost))

    def on_observe(self, message: Observe) -> Observed:
        """Methods that need hidden states are built with the speculation issue; ids come with Commit."""
        return Observed()

    def on_commit(self, message: Commit) -> None:
        """Extend the mirrors by what was committed."""
        if not self.mirrors:
            return
        ids, offsets = unpack(message.ids), unpack(message.offsets)
        for r, handle in enumerate(unpack(message.sequences).tolist()):
            if (mirror := self.mirrors.get(handle)) is not None:
                mirror.ids.extend(ids[offsets[r]:offsets[r + 1]].tolist())

    def on_close(self, message: Close) -> None:
        """Drop mirrors."""
        for handle in unpack(message.sequences).tolist():
            self._drop(handle)

    def on_inspect(self, message: Inspect) -> Report:
        """Facts for an operator."""
        return Report({"mirrors": len(self.mirrors)})

    def _propose(self, mirror: Sequence, budget: int) -> Proposal:
        """The method's proposal cut to the budget. Raises ValueError: what it proposes cannot be verified.

        Checked here, where only the asker's drafts are lost; on the device it would end the step's cell.
        """
        draft = self.method.propose(mirror, budget)
        tokens = draft.tokens[:budget]
        for name, column in (("parents", draft.parents), ("scores", draft.scores)):
            if column is not None and len(column) != len(draft.tokens):
                raise ValueError(f"the drafter proposed {len(draft.tokens)} tokens with {len(column)} {name}")
        if tokens and not (min(tokens) >= 0 and max(tokens) < self.vocabulary):
            raise ValueError(f"the drafter proposed ids {min(tokens)}..{max(tokens)}; the model has {self.vocabulary}")
        parents = draft.parents[:budget] if draft.parents is not None else None
        if parents is not None and not all(-1 <= parent < row for row, parent in enumerate(parents)):
            raise ValueError(f"the drafter proposed parents {parents}; each must be -1 or an earlier token's place")
        return Proposal(tokens, parents, draft.scores[:budget] if draft.scores is not None else None)

    def _drop(self, handle: int) -> None:
        if (mirror := self.mirrors.pop(handle, None)) is not None:
            self.method.close(mirror)


__all__ = ["EMPTY", "Drafter", "DrafterActor", "DrafterOptions", "Proposal", "Sequence", "index_of"]
