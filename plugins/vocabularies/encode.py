"""Turns text into token ids with the text of special tokens kept apart from special tokens.

It does not know where a tokenizer comes from or what a chat template looks like.

What a user writes must never become a control token. The library can only switch all special tokens off or on, so
texts that hold the text of one go through a twin of the tokenizer, made at first use: it knows every special token
under another name (an alias that nobody can guess), with the same id. Where the template wrote a special token, its
alias is put; what users wrote stays as it is and is cut like any text.
"""

import json
import re
import secrets
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer

from antiphon.plugins.vocabularies.errors import VocabularyError
from antiphon.plugins.vocabularies.rules import Rules
from antiphon.plugins.vocabularies.template import ChatTemplate, plain

_OPEN, _CLOSE = "\U0010fff0", "\U0010fff1"  # of an alias; private use
_MARKS = range(0xE000, 0xF900)  # private use characters, one of which marks what users wrote


class Encoder:
    """Encoding for one model; safe on several threads."""

    def __init__(self, rules: Rules):
        self.rules = rules
        added = rules.tokenizer.get_added_tokens_decoder()
        self.special = {token.content: index for index, token in added.items() if token.special and token.content}
        longest_first = sorted((token.content for token in added.values() if token.content), key=len, reverse=True)
        # The library takes the leftmost, longest added token; so does an alternation sorted by length.
        self.added = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.starts = {text[:size] for text in self.special for size in range(1, len(text))}
        self.reach = max(map(len, self.special), default=0)
        # A normalizer may make a special token of other characters (full-width letters under NFKC).
        folds = any(token.special and token.normalized for token in added.values())
        self.normalizer = rules.tokenizer.normalizer if folds else None
        self._secret = secrets.token_hex(8)
        self._twin: Any = None
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """Ids of user text with the model's BOS rule; the text of special tokens stays text."""
        _refuse_surrogates(text)
        ids: list[int] = (self._aliased() if self._holds_special(text) else self.rules.tokenizer).encode(text).ids
        return ids

    def encode_chat(self, template: ChatTemplate, messages: Sequence[Any], tools: Sequence[Any]) -> list[int]:
        """Ids of a rendered conversation; special tokens are those that the template wrote."""
        messages, tools = plain(messages), plain(tools)
        strings = list(_strings([messages, tools]))
        for text in strings:
            _refuse_surrogates(text)
        tokenizer = self.rules.tokenizer
        if any(self._suspect(text) for text in strings):
            mark = self._mark(strings)
            rendered = template.render(self._marked(messages, mark), self._marked(tools, mark))
            rendered = self.added.sub(lambda match: self._alias(match, mark), rendered)
            rendered = rendered.replace(mark, "").replace(_escape(mark), "")
            tokenizer = self._aliased()
        else:
            rendered = template.render(messages, tools)
        _refuse_surrogates(rendered)
        ids: list[int] = tokenizer.encode(rendered, add_special_tokens=False).ids
        return ids

    def _holds_special(self, text: str) -> bool:
        if any(match.group() in self.special for match in self.added.finditer(text)):
            return True
        if self.normalizer is None:
            return False
        return any(match.group() in self.special for match in self.added.finditer(self.normalizer.normalize_str(text)))

    def _suspect(self, text: str) -> bool:
        """Whether a special token stands in the text, or begins at its end and could go on in the next text."""
        return self._holds_special(text) or self._begun(text) < len(text)

    def _begun(self, text: str) -> int:
        """Where, in the text without trailing space, a special token begins that the end cuts off; else its length."""
        end = len(text.rstrip())
        for start in range(max(0, end - self.reach), end):
            if text[start:end] in self.starts:
                return start
        return len(text)

    def _mark(self, strings: Sequence[str]) -> str:
        """A private-use character that nobody wrote, neither as itself nor as JSON's escape."""
        everything = "".join([*strings, *self.rules.templates.values()])
        lower = everything.lower()
        for code in _MARKS:
            if chr(code) not in everything and _escape(chr(code)) not in lower:
                return chr(code)
        raise VocabularyError("the messages use every private-use character of Unicode; leave one out")

    def _marked(self, value: Any, mark: str) -> Any:
        """The same messages with ``mark`` after the first character of each special token's text."""
        if isinstance(value, str):
            begun = self._begun(value)
            if begun < len(value):
                value = value[: begun + 1] + mark + value[begun + 1 :]
            return self.added.sub(lambda m: m[0][0] + mark + m[0][1:] if m[0] in self.special else m[0], value)
        if isinstance(value, dict):
            return {self._marked(key, mark): self._marked(item, mark) for key, item in value.items()}
        return [self._marked(item, mark) for item in value] if isinstance(value, list) else value

    def _alias(self, match: re.Match[str], mark: str) -> str:
        text = match.group()
        if text not in self.special or match.string.startswith(mark, match.end()):  # marked: a token of one character
            return text
        return self._name(self.special[text])

    def _name(self, index: int) -> str:
        return f"{_OPEN}{self._secret}{index}{_CLOSE}"

    def _aliased(self) -> Any:
        with self._lock:
            if self._twin is None:
                self._twin = self._build()
            return self._twin

    def _build(self) -> Any:
        state = json.loads(self.rules.tokenizer.to_str())
        model = state["model"]
        names = {text: self._name(index) for text, index in self.special.items()}
        for token in state["added_tokens"]:
            if token["content"] in names:
                token |= {"content": names[token["content"]], "normalized": False, "single_word": False}
        # Tokens are renamed, not added: ids of added tokens are counted from the size of the model's vocabulary.
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(token, token): index for token, index in model["vocab"].items()}
        else:  # Unigram: a list of [token, score]
            model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
        if "merges" in model:  # none may make a special token of a user's text
            merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
            model["merges"] = [m for m in merges if "".join(m) not in names and names.keys().isdisjoint(m)]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        twin = Tokenizer.from_str(json.dumps(state, ensure_ascii=False))
        for index, token in self.rules.tokenizer.get_added_tokens_decoder().items():
            if twin.token_to_id(names.get(token.content, token.content)) != index:
                raise VocabularyError(f"{self.rules.origin}: token {token.content!r} cannot be kept apart from text")
        return twin


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _escape(mark: str) -> str:
    return f"\\u{ord(mark):04x}"  # as json.dumps(ensure_ascii=True) writes it


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as cause:
        raise VocabularyError(
            f"the text holds a lone surrogate (U+{ord(text[cause.start]):04X} at position {cause.start}), which is no"
            " character; decode the input with errors='replace' or join the pair"
        ) from None
