"""The tokenizer turns text into ids and ids into text, and finds stop strings.

It does not know sampling, scheduling or devices; its state per request can be rebuilt from ids.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any, ClassVar

from antiphon.actors.columns import pack, unpack
from antiphon.actors.protocol import (
    Accepted,
    Admit,
    Cancel,
    Delta,
    Emit,
    Encode,
    Encoded,
    Generate,
    Inspect,
    Refuse,
    Report,
    Resume,
)
from antiphon.runtime.actor import Actor, ActorSite
from antiphon.runtime.message import CONTROL
from antiphon.runtime.plugin import O, Options, Plugin


class Vocabulary(Plugin[O]):
    """Contract of a ``vocabulary``: one model's text rules. Methods may run on worker threads, several at once."""

    kind: ClassVar[str] = "vocabulary"

    def encode(self, text: str) -> list[int]:
        """Ids of user text with the model's BOS rule applied; the text of special tokens stays text."""
        raise NotImplementedError

    def encode_chat(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Ids of a conversation through the model's own template, ready for the assistant's answer.

        Special tokens that the template writes are special; those inside a message's content stay text.
        Raises TemplateError: the model has no template, or it fails or runs past its time limit.
        """
        raise NotImplementedError

    def decoder(self, ids: Sequence[int] = ()) -> "Decoder":
        """Start incremental detokenization after ``ids`` (the prompt or a resumed answer)."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """``{"size": n, "eos": [ids], "bos": id or None, "template": bool}``."""
        raise NotImplementedError


class Decoder:
    """Incremental detokenization of one sequence; holds back bytes that do not yet form a character."""

    def push(self, ids: Sequence[int]) -> str:
        """Text that has become certain with these ids."""
        raise NotImplementedError

    def finish(self) -> str:
        """What is still held back, with incomplete characters replaced by U+FFFD."""
        raise NotImplementedError


class TemplateError(Exception):
    """Seen by the caller as a refusal: the chat template cannot render these messages."""


class TextError(ValueError):
    """Seen by the caller as a refusal: text that no vocabulary can encode, such as a lone surrogate."""


class _Entry:
    """A request between its gateway and the scheduler."""

    __slots__ = ("cancelled", "count", "decoder", "encoding", "gateway")

    def __init__(self, gateway: str, count: int = 0):
        self.gateway = gateway
        self.decoder: Decoder | None = None  # set once the prompt's ids are known
        self.count = count  # generated ids that the decoder has had, or that the gateway had before
        self.encoding = False
        self.cancelled = False


class TokenizerOptions(Options, frozen=True):
    """Limits of text. Text longer than ``inline_chars`` is encoded on a worker thread."""

    inline_chars: int = 4096
    max_chars: int = 4_000_000
    threads: int = 2
    orphan_grace: float = 30.0  # seconds a request outlives its gateway's cell


class Tokenizer(Actor[TokenizerOptions]):
    """Stands between gateway and scheduler: text one way becomes ids, ids the other way become text."""

    kind = "tokenizer"
    plugs = ("vocabulary",)
    uses = ("scheduler",)
    sections = ("model",)

    def __init__(self, options: TokenizerOptions, site: ActorSite):
        super().__init__(options, site)
        self.vocabulary: Vocabulary[Any] = site.plugin("vocabulary")
        self.entries: dict[bytes, _Entry] = {}
        self.workers = ThreadPoolExecutor(options.threads, thread_name_prefix="encode")
        self.down = False  # the scheduler's cell died and is not back
        self.most_id = 0  # ids from here on are refused before a decoder sees them

    @classmethod
    def crossing(cls, kind: str, options: dict[str, Any], sections: dict[str, Any]) -> str:
        """The gateway's edge to a tokenizer elsewhere carries texts and ids."""
        return ("per request: its text, then 4 bytes for each token of its prompt; "
                "per sequence and step: 4 bytes and the text of each new token, about 40 bytes of names and numbers")

    async def start(self) -> None:
        """Read the vocabulary off the loop, so that the first request does not wait for it."""
        facts = await asyncio.get_running_loop().run_in_executor(self.workers, self.vocabulary.facts)
        # Models pad their vocabulary beyond the tokenizer's; the scheduler knows by how much.
        self.most_id = 2 * int(facts["size"]) + 1024

    async def stop(self, deadline: float) -> None:
        """Let the workers go."""
        self.workers.shutdown(wait=False, cancel_futures=True)

    def facts(self) -> dict[str, Any]:
        """Requests between gateway and scheduler."""
        return {"requests": len(self.entries)}

    def on_generate(self, message: Generate) -> None:
        """Encode, on a worker thread if the text is long, then admit."""
        if self.down:
            return  # the gateway hears of the death too, and replays everything
        entry = self.entries[message.request] = _Entry(self.sender)
        if message.ids is not None:
            self._admit(message, entry, unpack(message.ids).tolist())
            return
        text = message.text or ""
        if len(text) > self.options.max_chars:
            self._refuse(message.request, entry, "too_long", f"{len(text)} characters of text; at most "
                         f"{self.options.max_chars} are taken")
        elif len(text) <= self.options.inline_chars:
            self._encoded(message, entry, *self._encode(text, message.raw))
        else:
            entry.encoding = True
            self.site.spawn(self._encode_later(message, entry, text), "encode")

    def on_encode(self, message: Encode) -> Encoded | asyncio.Future[Encoded]:
        """Encode for an operation, on a worker thread if the text is long."""
        if len(message.text) <= self.options.inline_chars:
            return self._answer(message)
        if len(message.text) > self.options.max_chars:
            return Encoded(b"", f"{len(message.text)} characters of text; at most {self.options.max_chars} are taken")
        return asyncio.get_running_loop().run_in_executor(self.workers, self._answer, message)

    def _answer(self, message: Encode) -> Encoded:
        ids, problem = self._encode(message.text, message.raw)
        return Encoded(pack(ids), problem)

    def on_resume(self, message: Resume) -> None:
        """Rebuild the text's state from the ids and admit."""
        if self.down:
            return
        prompt, done = unpack(message.prompt).tolist(), unpack(message.ids).tolist()
        entry = self.entries[message.request] = _Entry(self.sender, len(done))
        if self._decodable(message.request, entry, [*prompt, *done]):
            self.tell(self.peer("scheduler"), Admit(
                message.request, message.tenant, pack([*prompt, *done]), len(prompt), message.sampling, message.seed,
                message.sample))

    def on_emit(self, message: Emit) -> None:
        """Add text to ids; one Delta for each gateway concerned."""
        offsets, index, ids = unpack(message.offsets).tolist(), unpack(message.index).tolist(), unpack(message.ids)
        found: dict[str, list[tuple[int, int, str]]] = {}
        cut = False
        for r, request in enumerate(message.requests):
            entry = self.entries.get(request)
            # Ids that the entry has already are from before a Resume took the request over; a gap means that what
            # the Resume asked for is still on its way.
            known = entry.count - index[r] if entry is not None else -1
            if entry is not None and message.finish[r] == "cancelled":  # it ends here, wherever a Resume made it begin
                known = min(max(known, 0), offsets[r + 1] - offsets[r])
                index[r] = entry.count - known
                cut = True
            if entry is None or entry.decoder is None or not 0 <= known <= offsets[r + 1] - offsets[r]:
                continue
            new = ids[offsets[r] + known:offsets[r + 1]].tolist()
            if not new and not message.finish[r]:
                continue
            cut = cut or known > 0
            entry.count += len(new)
            text = entry.decoder.push(new)
            if message.finish[r]:
                text += entry.decoder.finish()
                del self.entries[request]
            found.setdefault(entry.gateway, []).append((r, known, text))
        for gateway, rows in found.items():
            if len(rows) == len(message.requests) and not cut:  # the usual case: one gateway, nothing unknown
                self.tell(gateway, Delta(message.requests, message.index, message.offsets, message.ids,
                                         tuple(text for *_, text in rows), message.finish))
                continue
            pieces = [ids[offsets[r] + known:offsets[r + 1]].tolist() for r, known, _ in rows]
            self.tell(gateway, Delta(
                tuple(message.requests[r] for r, *_ in rows), pack([index[r] + known for r, known, _ in rows]),
                pack([0, *accumulate(map(len, pieces))]), pack([i for piece in pieces for i in piece]),
                tuple(text for *_, text in rows), tuple(message.finish[r] for r, *_ in rows)))

    def on_cancel(self, message: Cancel) -> None:
        """Pass on; a request that is still being encoded ends here."""
        entry = self.entries.get(message.request)
        if entry is not None and entry.encoding:
            entry.cancelled = True
        else:
            self.tell(self.peer("scheduler"), message, CONTROL)

    def on_refuse(self, message: Refuse) -> None:
        """Pass on."""
        if (entry := self.entries.pop(message.request, None)) is not None:
            self.tell(entry.gateway, message)

    def on_inspect(self, message: Inspect) -> Report:
        """Facts for an operator."""
        return Report(self.facts())

    def on_peer(self, instance: str, kind: str, up: bool) -> None:
        """Forget what a dead scheduler had; its gateway replays it. A dead gateway's requests wait for their clients.

        They do not wait for ever: a client that does not come back within the grace cannot cancel.
        """
        if instance == self.peer("scheduler"):
            self.down = not up
            if self.down:
                self.entries.clear()
        if kind == "gateway" and not up:
            orphans = {r: e for r, e in self.entries.items() if e.gateway == instance}
            asyncio.get_running_loop().call_later(self.options.orphan_grace, self._cancel_orphans, orphans)

    def _cancel_orphans(self, orphans: dict[bytes, _Entry]) -> None:
        for request, entry in orphans.items():
            if self.entries.get(request) is entry:
                self.tell(self.peer("scheduler"), Cancel(request), CONTROL)

    def _encode(self, text: str, raw: bool) -> tuple[list[int], str]:
        """Ids, or why there are none."""
        try:
            if raw:
                return self.vocabulary.encode(text), ""
            return self.vocabulary.encode_chat([{"role": "user", "content": text}]), ""
        except (TemplateError, ValueError) as cause:
            return [], str(cause)

    async def _encode_later(self, message: Generate, entry: _Entry, text: str) -> None:
        loop = asyncio.get_running_loop()
        ids, problem = await loop.run_in_executor(self.workers, self._encode, text, message.raw)
        entry.encoding = False
        if self.entries.get(message.request) is entry:
            self._encoded(message, entry, ids, problem)

    def _encoded(self, message: Generate, entry: _Entry, ids: list[int], problem: str) -> None:
        if problem:
            self._refuse(message.request, entry, "invalid", problem)
        elif entry.cancelled:
            del self.entries[message.request]
            self.tell(entry.gateway, Delta((message.request,), pack([0]), pack([0, 0]), b"", ("",), ("cancelled",)))
        else:
            self._admit(message, entry, ids)

    def _admit(self, message: Generate, entry: _Entry, ids: list[int]) -> None:
        """Tell the gateway what was accepted before the scheduler hears of it."""
        if not self._decodable(message.request, entry, ids):
            return
        column = pack(ids)
        self.tell(entry.gateway, Accepted(message.request, column))
        self.tell(self.peer("scheduler"), Admit(message.request, message.tenant, column, len(ids), message.sampling,
                                                message.seed, message.sample, message.like))

    def _decodable(self, request: bytes, entry: _Entry, ids: list[int]) -> bool:
        """Begin the entry's text after ``ids``, or refuse ids that no vocabulary of this size has."""
        if ids and not (min(ids) >= 0 and max(ids) < self.most_id):
            self._refuse(request, entry, "invalid", f"token ids {min(ids)}..{max(ids)} are not of this model's")
            return False
        entry.decoder = self.vocabulary.decoder(ids)
        return True

    def _refuse(self, request: bytes, entry: _Entry, kind: str, reason: str) -> None:
        self.entries.pop(request, None)
        self.tell(entry.gateway, Refuse(request, kind, reason))
