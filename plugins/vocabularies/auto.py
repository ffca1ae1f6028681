"""The vocabulary of a real model, found by the model's path.

It does not know how files are read or texts are cut: it picks the reader and joins the parts.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from antiphon.actors.tokenizer import Decoder, Vocabulary
from antiphon.plugins.catalogue.catalogue import resolve
from antiphon.plugins.vocabularies import gguf, hf
from antiphon.plugins.vocabularies.detokenize import Detokenizer, Pieces
from antiphon.plugins.vocabularies.encode import Encoder
from antiphon.plugins.vocabularies.rules import Rules
from antiphon.plugins.vocabularies.template import ChatTemplate
from antiphon.runtime.plugin import Options, Site


class AutoOptions(Options, frozen=True):
    """Limits of the chat template: CPU seconds it may run, characters it may write."""

    template_seconds: float = 1.0
    template_characters: int = 8_000_000


class Auto(Vocabulary[AutoOptions]):
    """Text rules from an HF directory, a ``.gguf`` file, or a catalogue name that stands for one."""

    def __init__(self, options: AutoOptions, site: Site):
        super().__init__(options, site)
        path = resolve(site.section("model").path)
        self.rules = read(path)
        for note in self.rules.notes:
            site.log.warning("vocabulary", note=note)
        self.template = ChatTemplate(
            self.rules.templates, self.rules.named, options.template_seconds, options.template_characters
        )
        self.encoder = Encoder(self.rules)
        self.pieces = Pieces(self.rules.tokenizer, self.rules.origin)
        self.size = self.rules.size()

    def encode(self, text: str) -> list[int]:
        """Ids of user text with the model's BOS rule applied; the text of special tokens stays text.

        Raises VocabularyError: the text holds a lone surrogate.
        """
        return self.encoder.encode(text)

    def encode_chat(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Ids of a conversation through the model's own template, ready for the assistant's answer.

        Raises TemplateError: no template, it fails, or passes a limit. VocabularyError: a lone surrogate.
        """
        return self.encoder.encode_chat(self.template, messages, tools)

    def decoder(self, ids: Sequence[int] = ()) -> Decoder:
        """Start incremental detokenization after ``ids``."""
        return Detokenizer(self.pieces, ids)

    def facts(self) -> dict[str, Any]:
        """``{"size": n, "eos": [ids], "bos": id or None, "template": bool}``."""
        return {
            "size": self.size,
            "eos": list(self.rules.eos),
            "bos": self.rules.bos,
            "template": bool(self.template),
        }


def read(path: Path) -> Rules:
    """Text rules of a resolved model path: a directory or a GGUF file."""
    return hf.read(path) if path.is_dir() else gguf.read(path)
