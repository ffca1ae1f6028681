"""How text is cut into words before byte-level BPE, by the name a GGUF file gives in ``tokenizer.ggml.pre``.

It does not know merges or special tokens. The patterns are those of the models' own ``tokenizer.json``; a name whose
rule is not established here is refused, since a wrong cut gives wrong ids and no error.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

from antiphon.plugins.vocabularies.errors import VocabularyError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(digits: str, letters: str = r"\p{L}", marks: str = "") -> str:
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}"
        rf"| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(digits: str, tail: str = "") -> str:
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{lead}{_UPPER}*{_LOWER}+{tail}|{lead}{_UPPER}+{_LOWER}*{tail}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
    ),
)
# What files written before pre-tokenizers had names mean: the four cuts that llama.cpp makes for them.
_UNNAMED = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True)
class PreTokenizer:
    """One named rule. ``ignore_merges`` takes a word that is a token as it is; ``bos`` is the rule's default."""

    make: Callable[[], Any]
    nfc: bool = False
    ignore_merges: bool = False
    bos: bool = False

    def normalizer(self) -> Any:
        """The normalizer that goes with the rule, or None."""
        return normalizers.NFC() if self.nfc else None


def _byte_level() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # its regex is GPT-2's


def _digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _cuts(*patterns: str) -> Any:
    cuts = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in patterns]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_LLAMA3 = PreTokenizer(partial(_cuts, _words(r"\p{N}{1,3}")), ignore_merges=True, bos=True)
_DBRX = PreTokenizer(partial(_cuts, _words(r"\p{N}{1,3}")))
_QWEN2 = PreTokenizer(partial(_cuts, _words(r"\p{N}")), nfc=True)
_QWEN35 = PreTokenizer(partial(_cuts, _words(r"\p{N}", r"\p{L}\p{M}", r"\p{M}")), nfc=True)
_GPT4O = PreTokenizer(partial(_cuts, _cased(r"\p{N}{1,3}", f"{_CONTRACTIONS}?")))
_DIGITS = PreTokenizer(_digits)

RULES: dict[str, PreTokenizer] = {
    "default": PreTokenizer(partial(_cuts, *_UNNAMED)),
    "gpt-2": PreTokenizer(_byte_level),
    "phi-2": PreTokenizer(_byte_level),
    "smollm": _DIGITS,  # digits one by one, then GPT-2's cut
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": PreTokenizer(_digits, nfc=True),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "dbrx": _DBRX,
    "smaug-bpe": _DBRX,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": _QWEN35,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "tekken": PreTokenizer(partial(_cuts, _cased(r"\p{N}")), ignore_merges=True, bos=True),
    "deepseek-v3": PreTokenizer(partial(_cuts, *_DEEPSEEK_V3)),
}


def find(name: Any, origin: str) -> PreTokenizer:
    """Rule called ``name``; VocabularyError names ``origin`` and lists what is supported."""
    if not isinstance(name, str) or name not in RULES:
        known = ", ".join(sorted(RULES))
        raise VocabularyError(f"{origin}: pre-tokenizer {name!r} is not supported; supported are: {known}")
    return RULES[name]
