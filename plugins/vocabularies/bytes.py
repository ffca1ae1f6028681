"""A vocabulary without a model: a token is a byte of UTF-8.

It does not know files, templates or merges. Made for the null backend, whose control plane and memory are tested
without any model on disk.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from antiphon.actors.tokenizer import Decoder, TemplateError, Vocabulary
from antiphon.plugins.vocabularies.detokenize import Detokenizer, Strip
from antiphon.plugins.vocabularies.errors import VocabularyError
from antiphon.runtime.plugin import Options, Site

EOS, BOS, PAD = 256, 257, 258
FIRST_SIGN = 259  # from here on an id is one CJK sign, so that whatever a hash draws can be read
_SIGNS = range(0x4E00, 0xA000)  # 20,992 signs


class BytesOptions(Options, frozen=True):
    """``size`` is the number of ids: 256 bytes, 3 special tokens, then signs. ``bos`` puts BOS before texts."""

    size: int = 512
    bos: bool = False


class Bytes(Vocabulary[BytesOptions]):
    """Ids 0-255 are bytes, 256-258 end, begin and pad, and the rest are signs that only a model writes."""

    def __init__(self, options: BytesOptions, site: Site):
        super().__init__(options, site)
        if not FIRST_SIGN <= options.size <= FIRST_SIGN + len(_SIGNS):
            raise VocabularyError(f"size is {options.size}; it may be {FIRST_SIGN} to {FIRST_SIGN + len(_SIGNS)}")

    def encode(self, text: str) -> list[int]:
        """The bytes of the text, after BOS if the option says so."""
        return [BOS] * self.options.bos + self._bytes(text)

    def encode_chat(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """A line ``role: content`` for each message, one ``tools: [...]`` before them, then ``assistant: ``."""
        if not messages:
            raise TemplateError("a conversation needs at least one message")
        lines = [f"tools: {msgspec.json.encode(list(tools)).decode()}\n"] if tools else []
        for message in messages:
            if not isinstance(message, dict) or "role" not in message:
                raise TemplateError(f"a message needs a role, found {message!r}")
            lines.append(f"{message['role']}: {_content(message.get('content'))}\n")
        return [BOS] * self.options.bos + self._bytes("".join(lines) + "assistant: ")

    def decoder(self, ids: Sequence[int] = ()) -> Decoder:
        """Start incremental detokenization after ``ids``."""
        return Detokenizer(_Pieces(), ids)

    def facts(self) -> dict[str, Any]:
        """``{"size": n, "eos": [256], "bos": 257 or None, "template": True}``."""
        return {"size": self.options.size, "eos": [EOS], "bos": BOS if self.options.bos else None, "template": True}

    def _bytes(self, text: str) -> list[int]:
        try:
            return list(text.encode())
        except UnicodeEncodeError as cause:
            raise VocabularyError(f"the text holds a lone surrogate, which is no character: {cause}") from cause


def _content(content: Any) -> str:
    """A message's text: a string, nothing, or a list of parts of which the texts count."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


class _Pieces:
    """The bytes of every id; special ids have none."""

    strip: Strip = "nothing"

    def __getitem__(self, index: int) -> bytes:
        if 0 <= index < EOS:
            return bytes([index])
        sign = index - FIRST_SIGN
        return chr(_SIGNS[sign]).encode() if 0 <= sign < len(_SIGNS) else b""
