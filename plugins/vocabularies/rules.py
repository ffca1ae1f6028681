"""What a model's files say of its text, in the one form that HF directories and GGUF files are both read into.

It does not know where the files lie or how requests use it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import processors

from antiphon.plugins.vocabularies.errors import VocabularyError

# Names under which chat templates know special tokens.
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class Rules:
    """One model's text rules. ``templates`` has the key "default" if the model can chat at all."""

    origin: str  # the file or directory, for messages
    tokenizer: Any  # tokenizers.Tokenizer, with padding and truncation off and the model's BOS rule on
    named: Mapping[str, str] = field(default_factory=dict)  # "bos_token" -> its text
    templates: Mapping[str, str] = field(default_factory=dict)
    bos: int | None = None
    eos: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()  # what the operator should know, such as a rule that had to be guessed

    def size(self) -> int:
        """One more than the highest token id."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def frame(tokenizer: Any, bos: str | None, eos: str | None, origin: str) -> Any:
    """Post-processor that puts ``bos`` before and ``eos`` after every text (None: nothing)."""
    special = []
    for token in (bos, eos):
        if token is not None:
            if tokenizer.token_to_id(token) is None:
                raise VocabularyError(f"{origin}: texts shall be framed with {token!r}, which is no token")
            special.append((token, tokenizer.token_to_id(token)))
    single = [token for token in (bos, "$A", eos) if token is not None]
    return processors.TemplateProcessing(single=single, pair=[*single, "$B:1"], special_tokens=special)
