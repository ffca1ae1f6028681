"""Builds a model's text rules from the metadata of a GGUF file.

It does not know chat templates or how texts are encoded, and reads no weights.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gguf.constants import Keys, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from antiphon.plugins.vocabularies import pretokenizers
from antiphon.plugins.vocabularies.errors import VocabularyError
from antiphon.plugins.vocabularies.metadata import read_header
from antiphon.plugins.vocabularies.rules import NAMED, Rules, frame

_KEY = Keys.Tokenizer
_IDS = {
    "bos_token": _KEY.BOS_ID,
    "eos_token": _KEY.EOS_ID,
    "unk_token": _KEY.UNK_ID,
    "sep_token": _KEY.SEP_ID,
    "pad_token": _KEY.PAD_ID,
    "mask_token": _KEY.MASK_ID,
}
# Ends of a turn. Files often name only the end of a document as EOS; one of these that the template writes also ends.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|return|>")
# What a SentencePiece file without these keys means.
_SENTENCEPIECE_IDS = {_KEY.BOS_ID: 1, _KEY.EOS_ID: 2, _KEY.UNK_ID: 0}
_SPACE = "▁"  # U+2581, SentencePiece's space


def read(path: Path) -> Rules:
    """Text rules of a GGUF file.

    Raises VocabularyError: no GGUF file, no vocabulary in it, or rules that are not supported.
    """
    header = read_header(path, ("tokenizer.",))
    model, tokens = header.get(_KEY.MODEL), header.get(_KEY.LIST)
    if not model or not tokens:
        raise VocabularyError(f"{path} holds no vocabulary ({_KEY.MODEL} and {_KEY.LIST}); use a file made with one")
    if model not in ("gpt2", "llama"):
        raise VocabularyError(f"{path}: vocabulary type {model!r} is not supported; supported are 'gpt2' and 'llama'")
    if not _texts(tokens):
        raise VocabularyError(f"{path}: {_KEY.LIST} is not a list of texts")
    kinds = _column(header, _KEY.TOKEN_TYPE, len(tokens), path) or [TokenType.NORMAL] * len(tokens)
    tokenizer, bos_rule = (_byte_level if model == "gpt2" else _sentencepiece)(header, tokens, kinds, path)
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (TokenType.CONTROL, TokenType.UNKNOWN) and token
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, special=False, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == TokenType.USER_DEFINED and token
        ]
    )
    if model == "llama":
        header = _SENTENCEPIECE_IDS | header
    ids = {name: _id(header, key, len(tokens), path) for name, key in _IDS.items()}
    named = {name: tokens[ids[name]] for name in NAMED if ids.get(name) is not None}
    bos = named.get("bos_token") if header.get(_KEY.ADD_BOS, bos_rule) else None
    eos = named.get("eos_token") if header.get(_KEY.ADD_EOS, False) else None
    tokenizer.post_processor = frame(tokenizer, bos, eos, str(path))
    templates = _templates(header)
    ends = [_id(header, key, len(tokens), path) for key in (_KEY.EOS_ID, _KEY.EOT_ID, _KEY.EOM_ID)]
    ends += [tokens.index(t) for t in _TURN_ENDS if t in tokens and any(t in text for text in templates.values())]
    eos_ids = tuple(dict.fromkeys(end for end in ends if end is not None))
    notes: tuple[str, ...] = ()
    if model == "gpt2" and _KEY.PRE not in header:
        notes = (f"{path} does not name its pre-tokenizer ({_KEY.PRE}); texts may be cut wrongly. Convert it anew",)
    return Rules(str(path), tokenizer, named, templates, ids["bos_token"], eos_ids, notes)


def _byte_level(header: dict[str, Any], tokens: Sequence[str], _kinds: Sequence[int], path: Path) -> tuple[Any, bool]:
    """BPE over bytes written as printable characters: tokens and merges as they stand in the file."""
    if _KEY.MERGES not in header:
        raise VocabularyError(f"{path}: a 'gpt2' vocabulary needs merges ({_KEY.MERGES}); the file has none")
    rule = pretokenizers.find(header.get(_KEY.PRE, "default"), str(path))
    tokenizer = _bpe(tokens, _split(header[_KEY.MERGES], path), path, ignore_merges=rule.ignore_merges)
    if rule.nfc:
        tokenizer.normalizer = rule.normalizer()
    tokenizer.pre_tokenizer = rule.make()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rule.bos


def _sentencepiece(header: dict[str, Any], tokens: Sequence[str], kinds: Sequence[int], path: Path) -> tuple[Any, bool]:
    """SentencePiece BPE: the score of a piece is the rank of making it; characters without a piece become bytes."""
    if _KEY.MERGES in header:
        merges = _split(header[_KEY.MERGES], path)
    else:
        scores = _column(header, _KEY.SCORES, len(tokens), path)
        if scores is None:
            raise VocabularyError(f"{path}: a 'llama' vocabulary needs scores ({_KEY.SCORES}); the file has none")
        merges = _merges(tokens, kinds, scores)
    unknown = next((t for t, k in zip(tokens, kinds, strict=True) if k == TokenType.UNKNOWN), None)
    tokenizer = _bpe(tokens, merges, path, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    prefix = bool(header.get(_KEY.ADD_PREFIX, True))
    replace = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefix else replace
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer, True


def _bpe(tokens: Sequence[str], merges: list[tuple[str, str]], path: Path, **options: Any) -> Any:
    vocabulary: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocabulary.setdefault(token, index)
    try:
        return Tokenizer(models.BPE(vocabulary, merges, **options))
    except Exception as cause:  # the library raises bare Exception for a merge of unknown tokens
        raise VocabularyError(f"{path}: tokens and merges do not fit together: {cause}") from cause


def _split(merges: Sequence[str], path: Path) -> list[tuple[str, str]]:
    if not _texts(merges):
        raise VocabularyError(f"{path}: {_KEY.MERGES} is not a list of texts")
    pairs = []
    for merge in merges:
        left, _, right = merge[1:].partition(" ")  # a piece is never empty, but the first may start with a space
        if not right:
            raise VocabularyError(f"{path}: malformed merge {merge!r}; expected two pieces with a space between")
        pairs.append((merge[0] + left, right))
    return pairs


def _merges(tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All ways to make a piece of two others, best piece first.

    Only normal pieces take part: merging "<" with "s>" must never make the control token "<s>".
    """
    made_of = (TokenType.NORMAL, TokenType.UNUSED, TokenType.USER_DEFINED)
    ids = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind in made_of}
    ranked = []
    for token, index in ids.items():
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[index], index, left, right))
    ranked.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in ranked]


def _column(header: dict[str, Any], key: str, size: int, path: Path) -> list[Any] | None:
    column: list[Any] | None = header.get(key)
    fits = isinstance(column, list) and len(column) == size and all(isinstance(item, int | float) for item in column)
    if column is not None and not fits:
        raise VocabularyError(f"{path}: {key} does not have one number for each of the {size} tokens")
    return column


def _templates(header: dict[str, Any]) -> dict[str, str]:
    """``tokenizer.chat_template`` and the named ones, ``tokenizer.chat_template.tool_use`` for instance."""
    found = {}
    for key, value in header.items():
        if isinstance(value, str) and (key + ".").startswith(_KEY.CHAT_TEMPLATE + "."):
            found[key[len(_KEY.CHAT_TEMPLATE) + 1 :] or "default"] = value
    return found


def _id(header: dict[str, Any], key: str, size: int, path: Path) -> int | None:
    """Token id under ``key``; None if absent or past the end, as files write for "there is none"."""
    value = header.get(key)
    if value is not None and not isinstance(value, int):
        raise VocabularyError(f"{path}: {key} is {value!r}, not a token id")
    return value if value is not None and 0 <= value < size else None


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
