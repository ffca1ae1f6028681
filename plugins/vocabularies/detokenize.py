"""Turns token ids into text as they come, holding back bytes that do not yet form a character.

It does not know requests or stop strings. Text is decided on bytes: all tokens' bytes one after the other, special
tokens left out, decoded as UTF-8 with U+FFFD for what is invalid. So any split of the ids gives the same text.
"""

import codecs
import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from antiphon.actors.tokenizer import Decoder
from antiphon.plugins.vocabularies.errors import VocabularyError

_TAIL = 3  # bytes that decide what a UTF-8 decoder holds back: an unfinished character has at most three

# What goes at the start of a text, since SentencePiece adds a space there: nothing, one space, or every space of the
# first token (a Metaspace decoder takes them all).
Strip = Literal["nothing", "space", "token"]


class Table(Protocol):
    """The bytes of every token, and what goes at the start of a text."""

    strip: Strip

    def __getitem__(self, index: int) -> bytes: ...


def _byte_alphabet() -> dict[str, int]:
    """Byte of each character in which byte-level BPE writes bytes (GPT-2, Radford et al. 2019).

    Printable Latin-1 stands for itself; the other 68 bytes are the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


class Pieces:
    """The bytes of every token of one tokenizer; looked up once per id. Safe to share between threads."""

    def __init__(self, tokenizer: Any, origin: str):
        self.tokenizer = tokenizer
        self.special = {i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
        self.known: dict[int, bytes] = {}
        decoder = tokenizer.decoder
        state = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "none"}  # its state is JSON
        self.to_bytes, self.strip = _rule(state, origin)

    def __getitem__(self, index: int) -> bytes:
        """Bytes of a token; none for special tokens and for ids past the vocabulary."""
        piece = self.known.get(index)
        if piece is None:
            token = self.tokenizer.id_to_token(index) if index >= 0 and index not in self.special else None
            piece = self.known[index] = self.to_bytes(token) if token is not None else b""
        return piece


def _rule(state: dict[str, Any], origin: str) -> tuple[Callable[[str], bytes], Strip]:
    """How a token becomes bytes, and what goes at the start of a text."""
    kind = state["type"]
    if kind == "ByteLevel":
        return _ByteLevel(), "nothing"
    if kind == "Metaspace":
        added = state.get("prepend_scheme", "always" if state.get("add_prefix_space", True) else "never")
        return _Pieces(state.get("replacement", "▁"), False), "nothing" if added == "never" else "token"
    steps = state.get("decoders", []) if kind == "Sequence" else []
    names = [step["type"] for step in steps]
    if names in (["ByteLevel"], ["Metaspace"]):
        return _rule(steps[0], origin)
    if names == ["ByteFallback", "Metaspace"]:
        return _Pieces(steps[1].get("replacement", "▁"), True), _rule(steps[1], origin)[1]
    space = {"String": "▁"}, " "
    if names in (_PLAIN, [*_PLAIN, "Strip"]) and (steps[0]["pattern"], steps[0]["content"]) == space:
        strip = steps[3] if len(steps) == 4 else {"content": " ", "start": 0, "stop": 0}
        if (strip["content"], strip["stop"]) == (" ", 0) and strip["start"] in (0, 1):
            return _Pieces("▁", True), "space" if strip["start"] else "nothing"
    found = "+".join(names) or kind
    raise VocabularyError(
        f"{origin}: the tokenizer's decoder {found!r} is not supported; supported are ByteLevel (byte-level BPE),"
        " Metaspace and Replace+ByteFallback+Fuse with or without Strip (SentencePiece)"
    )


_PLAIN = ["Replace", "ByteFallback", "Fuse"]


class _ByteLevel:
    """Token text in the byte alphabet; an added token with other characters in it stands for itself."""

    def __init__(self) -> None:
        self.alphabet = _byte_alphabet()

    def __call__(self, token: str) -> bytes:
        try:
            return bytes([self.alphabet[character] for character in token])
        except KeyError:
            return token.encode()


class _Pieces:
    """SentencePiece text: a mark for the space, and ``<0x0A>`` for bytes where the model falls back to them."""

    def __init__(self, mark: str, fallback: bool):
        self.mark = mark
        self.bytes = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)} if fallback else {}

    def __call__(self, token: str) -> bytes:
        return self.bytes.get(token) or token.replace(self.mark, " ").encode()


class Detokenizer(Decoder):
    """Incremental text of one sequence; each push costs what its new ids cost."""

    def __init__(self, pieces: Table, ids: Sequence[int] = ()):
        self.pieces = pieces
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.strip: Strip = "nothing" if any(pieces[i] for i in ids) else pieces.strip
        tail = b""
        for index in reversed(ids):
            tail = pieces[index] + tail
            if len(tail) >= _TAIL:
                break
        self.utf8.decode(tail[-_TAIL:])

    def push(self, ids: Sequence[int]) -> str:
        """Text that has become certain with these ids."""
        new = [self.pieces[i] for i in ids]
        if self.strip != "nothing":
            self._start(new)
        return self.utf8.decode(b"".join(new))

    def finish(self) -> str:
        """U+FFFD for the bytes of a character that was not finished, if there are any."""
        return self.utf8.decode(b"", final=True)

    def _start(self, new: list[bytes]) -> None:
        first = next((n for n, piece in enumerate(new) if piece), None)
        if first is not None:
            new[first] = new[first].removeprefix(b" ") if self.strip == "space" else new[first].replace(b" ", b"")
            self.strip = "nothing"
