"""The tokenizer turns text into ids and ids into text, and finds stop strings.

It does not know sampling, scheduling or devices; its state per request can be rebuilt from ids.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from antiphon.runtime.plugin import O, Plugin


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
