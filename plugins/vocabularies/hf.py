"""Builds a model's text rules from the files of an HF checkpoint directory.

It does not know chat templates or how texts are encoded; ``tokenizer.json`` decides how text is cut.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from antiphon.plugins.vocabularies.errors import VocabularyError
from antiphon.plugins.vocabularies.rules import NAMED, Rules, frame


def read(path: Path) -> Rules:
    """Text rules of an HF directory.

    Raises VocabularyError: no ``tokenizer.json``, or a file that does not parse.
    """
    source = path / "tokenizer.json"
    if not source.is_file():
        raise VocabularyError(
            f"{path} has no tokenizer.json; save the model's tokenizer in that form, for instance with"
            " transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        tokenizer = Tokenizer.from_file(str(source))
    except Exception as cause:  # the library raises bare Exception for what it cannot parse
        raise VocabularyError(f"{source} does not load: {cause}") from cause
    tokenizer.no_padding()
    tokenizer.no_truncation()
    config = _json(path / "tokenizer_config.json")
    legacy = _json(path / "special_tokens_map.json")  # written beside the config by older tools
    named = {name: _text(config.get(name, legacy.get(name))) for name in NAMED}
    named = {name: text for name, text in named.items() if text}
    _add(tokenizer, config, legacy, list(named.values()), path)
    if "add_bos_token" in config or "add_eos_token" in config:  # said aloud, it overrules tokenizer.json
        bos = named.get("bos_token") if config.get("add_bos_token") else None
        eos = named.get("eos_token") if config.get("add_eos_token") else None
        tokenizer.post_processor = frame(tokenizer, bos, eos, str(path))
    bos_id = tokenizer.token_to_id(named["bos_token"]) if "bos_token" in named else None
    return Rules(str(path), tokenizer, named, _templates(path, config), bos_id, _ends(path, tokenizer, named))


def _add(tokenizer: Any, config: dict[str, Any], legacy: dict[str, Any], named: list[str], path: Path) -> None:
    """Tokens that the config knows and ``tokenizer.json`` does not, in the order of their ids."""
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder") or {}
    try:
        for _, entry in sorted(declared.items(), key=lambda item: int(item[0])):
            if entry["content"] not in known:
                tokenizer.add_tokens([AddedToken(**entry)])
                known[entry["content"]] = AddedToken(**entry)
    except (AttributeError, KeyError, TypeError, ValueError) as cause:
        raise VocabularyError(f"{path}/tokenizer_config.json: malformed added_tokens_decoder: {cause!r}") from cause
    special = list(named)
    for source in (config, legacy):
        for name in ("additional_special_tokens", "extra_special_tokens"):
            extra = source.get(name) or ()
            special += [_text(token) for token in (extra.values() if isinstance(extra, dict) else extra)]
    for text in dict.fromkeys(special):
        if text and not (text in known and known[text].special):
            tokenizer.add_special_tokens([known.get(text) or AddedToken(text, special=True, normalized=False)])


def _templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name. A file of its own goes before the config's entry."""
    entry = config.get("chat_template")
    if isinstance(entry, str):
        found = {"default": entry}
    elif isinstance(entry, list):
        found = {item["name"]: item["template"] for item in entry if {"name", "template"} <= set(item)}
    else:
        found = {}
    for file in (*sorted((path / "additional_chat_templates").glob("*.jinja")), path / "chat_template.jinja"):
        if file.is_file():
            name = "default" if file.name == "chat_template.jinja" else file.stem
            try:
                found[name] = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as cause:
                raise VocabularyError(f"{file} cannot be read: {cause}") from cause
    return found


def _ends(path: Path, tokenizer: Any, named: dict[str, str]) -> tuple[int, ...]:
    """Ids that end an answer: generation_config.json, else config.json, and always the tokenizer's EOS."""
    ends: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _json(path / name).get("eos_token_id")
        if value is not None:
            ends = list(value) if isinstance(value, list) else [value]
            break
    if "eos_token" in named:
        ends.append(tokenizer.token_to_id(named["eos_token"]))
    if not all(isinstance(end, int) for end in ends):
        raise VocabularyError(f"{path}: eos_token_id holds {ends!r}; expected token ids")
    return tuple(dict.fromkeys(ends))


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise VocabularyError(f"{path} is no JSON: {cause}") from cause
    if not isinstance(value, dict):
        raise VocabularyError(f"{path} holds a {type(value).__name__}; expected an object")
    return value


def _text(token: Any) -> str:
    """Special tokens stand as text or as an object with the text in ``content``."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
