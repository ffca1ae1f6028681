"""Drafters that know the null backend's hash and err on purpose; used as ``./tests/drafters.py:Oracle``.

They do not know what the scheduler does with their drafts.
"""

import os
import signal
from pathlib import Path

import numpy as np

from antiphon.actors.drafter import Drafter, Proposal, Sequence
from antiphon.kernels import sampling
from antiphon.plugins.backends.null import NullOptions, expected
from antiphon.runtime.plugin import Options, Site

HERE = Path(__file__).resolve()


def plugin(name: str) -> str:
    """Override that makes a class of this file the drafter."""
    return f"actors.drafter.plugin='{HERE}:{name}'"


class OracleOptions(Options, frozen=True):
    """``wrong`` n: about every n-th drafted token is wrong (0: none). ``shape`` "chain" or "tree".

    Sampling as the requests of the test have it; without a temperature it drafts what greedy would choose.
    """

    depth: int = 4
    wrong: int = 3
    shape: str = "chain"
    vocabulary: int = 512
    window: int = 24
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    every: int = 5  # Forgetful, Mortal, Raising: proposals between accidents
    once: str = ""  # Mortal: file that says that it has died


class Oracle(Drafter[OracleOptions]):
    """Drafts what the null backend will choose, with errors at places that depend on position and token only."""

    most = 32
    lag = 0
    tree = True

    def __init__(self, options: OracleOptions, site: Site):
        super().__init__(options, site)
        self.null = NullOptions(vocabulary=options.vocabulary, window=options.window)
        self.proposals = 0
        self.open: set[int] = set()

    def propose(self, sequence: Sequence, k: int) -> Proposal:
        """A chain, or a tree whose branches that lead astray come first."""
        self.proposals += 1
        self.open.add(sequence.handle)
        return self._tree(sequence.ids, k) if self.options.shape == "tree" else self._chain(sequence.ids, k)

    def close(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        self.open.discard(sequence.handle)

    def _next(self, ids: list[int]) -> int:
        o = self.options
        params = sampling.sampling(1, o.temperature, o.top_k, o.top_p, o.seed, 0, len(ids))
        return int(sampling.choose(expected(np.array(ids), self.null)[None], params)[0])

    def _errs(self, ids: list[int], token: int) -> bool:
        return bool(self.options.wrong) and (len(ids) * 7 + token) % self.options.wrong == 0

    def _other(self, token: int, by: int = 1) -> int:
        return (token + by) % self.options.vocabulary

    def _chain(self, ids: list[int], k: int) -> Proposal:
        ids, tokens = list(ids), []
        for _ in range(min(k, self.options.depth)):
            token = self._next(ids)
            tokens.append(self._other(token) if self._errs(ids, token) else token)
            ids.append(tokens[-1])
        return Proposal(tokens)

    def _tree(self, ids: list[int], k: int) -> Proposal:
        ids, tip = list(ids), -1
        tokens: list[int] = []
        parents: list[int] = []
        for _ in range(self.options.depth):
            token = self._next(ids)
            astray = len(tokens)
            tokens += [self._other(token), self._other(token, 2), self._other(token, 3)]
            parents += [tip, astray, tip]  # a wrong branch of two, and a wrong sibling
            if self._errs(ids, token):
                break
            parents.append(tip)
            tip = len(tokens)
            tokens.append(token)
            ids.append(token)
        return Proposal(tokens[:k], parents[:k], [1.0 / (1 + i) for i in range(min(k, len(tokens)))])


class Ahead(Oracle):
    """The same, said not to need the tokens of the step before: plans go one step ahead beside it."""

    lag = 1


class Forgetful(Oracle):
    """Loses its mirror now and then."""

    def propose(self, sequence: Sequence, k: int) -> Proposal:
        """Draft, then lose a token."""
        proposal = super().propose(sequence, k)
        if self.proposals % self.options.every == 0:
            sequence.ids.pop()
        return proposal


class Mortal(Oracle):
    """Kills its process once."""

    def propose(self, sequence: Sequence, k: int) -> Proposal:
        """Draft, or die."""
        died = Path(self.options.once)
        if self.proposals >= self.options.every and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().propose(sequence, k)


class Fatal(Oracle):
    """Kills its process every time."""

    def propose(self, sequence: Sequence, k: int) -> Proposal:
        """Die, sooner or later."""
        if self.proposals >= self.options.every:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().propose(sequence, k)


class Raising(Oracle):
    """Fails at every n-th proposal; with ``every`` 1, always."""

    def propose(self, sequence: Sequence, k: int) -> Proposal:
        """Draft, or raise."""
        proposal = super().propose(sequence, k)
        if self.proposals % self.options.every == 0:
            raise RuntimeError("this drafter fails on purpose")
        return proposal


class Nonsense(Oracle):
    """Proposes what no model has and no tree is."""

    def propose(self, sequence: Sequence, k: int) -> Proposal:
        """One kind of nonsense after the other."""
        self.proposals += 1
        wrong = [
            Proposal([self.options.vocabulary]), Proposal([-1]), Proposal([1, 2], [0, -1]), Proposal([1, 2], [-1]),
            Proposal([1], [-2]), Proposal([1, 2], None, [0.5]), Proposal([1] * (k + 40)),
        ]
        return wrong[self.proposals % len(wrong)]
