"""The verifier decides which drafted tokens stand and which token follows; it owns sampler state per sequence.

It does not know how drafts were made, nor where the KV of their rows lies.
"""

import asyncio
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np

from antiphon.actors.columns import I32, index_of, indexes, pack, unpack
from antiphon.actors.device import Device
from antiphon.actors.protocol import Close, Fork, Inspect, Open, Prepare, Prepared, Report, Verified, Verify
from antiphon.actors.rows import RowParams, SequenceParams
from antiphon.runtime.actor import Actor, ActorSite
from antiphon.runtime.message import Buffer
from antiphon.runtime.plugin import O, Options, Plugin


class Rows(NamedTuple):
    """Logit rows of one step. R sequences, L rows; row 0 of each is its last committed token, the others are drafts.

    Either ``logits`` [L, vocabulary] float32 (host array or CPU tensor) or ``reduced`` frames is given.
    """

    logits: Any
    reduced: tuple[memoryview, ...]
    params: RowParams  # [L]
    offsets: I32  # [R + 1]
    tokens: I32  # [L]
    parents: I32 | None  # [L] local, -1 for row 0; None: chains


class Verdict(NamedTuple):
    """``counts`` [R] emitted tokens, ``ids`` in order, ``kept_counts`` [R], ``kept`` local rows, ``chosen`` [L]."""

    counts: I32
    ids: I32
    kept_counts: I32
    kept: I32
    chosen: I32


class Acceptance(Plugin[O]):
    """Contract of an ``acceptance``: which drafts stand. ``where`` says whether it reads device values or frames."""

    kind: ClassVar[str] = "acceptance"
    where: ClassVar[frozenset[str]] = frozenset({"host", "device"})

    def verify(self, rows: Rows) -> Verdict:
        """Judge all rows of a step. Runs as a stage on the device thread, or on the verifier's own loop."""
        raise NotImplementedError


class VerifierOptions(Options, frozen=True):
    """The verifier has no options of its own."""


class Verifier(Actor[VerifierOptions]):
    """Hosts an acceptance rule: as a stage beside the executor, or in a cell of its own on frames."""

    kind = "verifier"
    plugs = ("acceptance",)

    def __init__(self, options: VerifierOptions, site: ActorSite):
        super().__init__(options, site)
        self.rule: Acceptance[Any] = site.plugin("acceptance")
        self.device: Device | None = site.services.get("device")
        self.params = SequenceParams()
        self.vocabulary = 0

    @classmethod
    def crossing(cls, kind: str, options: dict[str, Any], sections: dict[str, Any]) -> str:
        """The scheduler's edge to a verifier elsewhere carries logits."""
        return ("per verified row: 4 bytes for greedy; 8 bytes for each token that top-k and top-p leave; "
                "4 bytes for each token of the vocabulary if nothing is cut. Steps are not planned ahead.")

    def on_prepare(self, message: Prepare) -> Prepared:
        """Say whether logits are read through the device table."""
        self.vocabulary = message.facts.vocabulary
        return Prepared(device=self.device is not None)

    def on_open(self, message: Open) -> None:
        """Note the sampling parameters."""
        self.params.open(index_of(message.sequence), message)

    def on_fork(self, message: Fork) -> None:
        """Copy the source's parameters."""
        self.params.fork(index_of(message.sequence), index_of(message.source), message.sample)

    def on_close(self, message: Close) -> None:
        """Nothing is held beyond the parameters, which the next Open replaces."""

    def on_verify(self, message: Verify) -> "Verified | asyncio.Future[Verified]":
        """Queue the judgement behind the step's rows, or judge the frames."""
        offsets, tokens, positions = unpack(message.offsets), unpack(message.tokens), unpack(message.positions)
        sequences = indexes(unpack(message.sequences))
        parents = unpack(message.parents) if message.parents else None
        if len(tokens) > len(sequences):  # drafts: each row predicts the token one deeper than itself
            counts = np.diff(offsets)
            owner = np.repeat(np.arange(len(counts)), counts)
            depth = np.arange(len(tokens)) - offsets[:-1][owner] if parents is None else _depths(parents, offsets)
            sequences, positions = sequences[owner], (positions[owner] + depth).astype(np.int32)
        rows = Rows(None, (), self.params.rows(sequences, positions), offsets, tokens, parents)
        if message.logits is None:
            return _verified(self.rule.verify(rows._replace(reduced=tuple(_view(f) for f in message.frames))))
        device, handle = self.device, message.logits
        if device is None:
            raise LookupError("Verify names a device handle, but this cell has no device table")

        def stage() -> Verified:
            verdict = self.rule.verify(rows._replace(logits=device.value(handle)))
            device.chosen[message.step] = verdict.chosen
            return _verified(verdict)

        return device.submit(stage, "verify", chooses=message.step)

    def on_inspect(self, message: Inspect) -> Report:
        """Facts for an operator."""
        return Report(self.facts())


def _view(buffer: Buffer) -> memoryview:
    return buffer.view


def _verified(verdict: Verdict) -> Verified:
    return Verified(pack(_offsets(verdict.counts)), pack(verdict.ids),
                    pack(_offsets(verdict.kept_counts)), pack(verdict.kept))


def _offsets(counts: I32) -> I32:
    offsets = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _depths(parents: I32, offsets: I32) -> I32:
    depth = np.zeros(len(parents), dtype=np.int32)
    for begin, end in pairwise(offsets):
        for row in range(begin + 1, end):
            depth[row] = depth[begin + parents[row]] + 1
    return depth
