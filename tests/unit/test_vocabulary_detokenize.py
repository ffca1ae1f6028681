"""Incremental detokenization: the same text for every split, and text given out never changes."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoints import byte_alphabet
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models

from antiphon.plugins.vocabularies.detokenize import Detokenizer, Pieces, _byte_alphabet
from antiphon.plugins.vocabularies.errors import VocabularyError


def byte_level() -> Pieces:
    tokens = [*byte_alphabet(), "âĤ", "Ġthe", "ðŁ", "<eos>", "<think>", "é x"]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("é x", normalized=False)])
    return Pieces(tokenizer, "test")


def sentencepiece(decoder: Any) -> Pieces:
    words = ["<unk>", "<s>", "▁", "▁▁", "▁hello", "hello", "▁a▁b", "漢", "é", "a▁"]
    tokens = [*words, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "<unk>"])
    return Pieces(tokenizer, "test")


def strip(count: int) -> Any:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if count else steps)


BYTES = byte_level()
STRIPPED, KEPT, METASPACE = sentencepiece(strip(1)), sentencepiece(strip(0)), sentencepiece(decoders.Metaspace())
TABLES = [BYTES, STRIPPED, KEPT, METASPACE]


def whole(pieces: Pieces, ids: list[int]) -> str:
    """All bytes at once, with the rule for the first space written a second time."""
    parts = [pieces[i] for i in ids]
    first = next((n for n, part in enumerate(parts) if part), None)
    if first is not None and pieces.strip == "token":
        parts[first] = parts[first].replace(b" ", b"")
    joined = b"".join(parts)
    if pieces.strip == "space" and joined.startswith(b" "):
        joined = joined[1:]
    return joined.decode("utf-8", errors="replace")


def pushed(pieces: Pieces, ids: list[int], cuts: list[int], prompt: list[int] | None = None) -> str:
    decoder = Detokenizer(pieces, prompt or [])
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    text = "".join(decoder.push(ids[a:b]) for a, b in pairwise(edges))
    return text + decoder.finish()


ids_of = st.lists(st.integers(-1, 300), max_size=40)


@settings(max_examples=300, deadline=None)
@given(table=st.sampled_from(range(4)), ids=ids_of, cuts=st.lists(st.integers(0, 40)))
def test_every_split_gives_the_text_of_the_whole(table: int, ids: list[int], cuts: list[int]) -> None:
    assert pushed(TABLES[table], ids, cuts) == whole(TABLES[table], ids)


@settings(max_examples=300, deadline=None)
@given(text=st.text(), cuts=st.lists(st.integers(0, 40)))
def test_every_text_comes_back(text: str, cuts: list[int]) -> None:
    assert pushed(BYTES, list(text.encode()), cuts) == text
    assert pushed(KEPT, [10 + byte for byte in text.encode()], cuts) == text


@settings(max_examples=300, deadline=None)
@given(raw=st.binary(), cuts=st.lists(st.integers(0, 40)))
def test_invalid_bytes_are_replaced_as_python_replaces_them(raw: bytes, cuts: list[int]) -> None:
    assert pushed(BYTES, list(raw), cuts) == raw.decode("utf-8", errors="replace")


@settings(max_examples=300, deadline=None)
@given(table=st.sampled_from(range(4)), prompt=ids_of, ids=ids_of)
def test_after_a_prompt_comes_what_the_prompt_held_back(table: int, prompt: list[int], ids: list[int]) -> None:
    before = Detokenizer(TABLES[table])
    assert before.push(prompt) + pushed(TABLES[table], ids, [], prompt) == whole(TABLES[table], prompt + ids)


@settings(max_examples=200, deadline=None)
@given(table=st.sampled_from(range(4)), ids=st.lists(st.integers(0, 9), max_size=12))
def test_the_whole_is_what_the_library_decodes(table: int, ids: list[int]) -> None:
    tokenizer = TABLES[table].tokenizer
    assert pushed(TABLES[table], ids, [1, 2, 3]) == tokenizer.decode(ids, skip_special_tokens=True)


def test_valid_bytes_decode_as_the_library_does() -> None:
    for text in ("hé 漢", "👩‍🚀", "\n"):
        ids = [4, *(10 + byte for byte in text.encode()), 5]
        assert pushed(STRIPPED, ids, [3, 4, 5]) == STRIPPED.tokenizer.decode(ids) == f"hello{text}hello"


def test_a_character_is_given_out_with_its_last_byte() -> None:
    decoder = Detokenizer(BYTES)
    assert [decoder.push([byte]) for byte in "€!".encode()] == ["", "", "€", "!"]
    assert decoder.push([256]) == ""
    assert decoder.finish() == "\ufffd"


def test_special_tokens_are_left_out_and_added_ones_are_not() -> None:
    assert pushed(BYTES, [97, 259, 260, 261, 9999, -1], []) == "a<think>é x"


def test_the_first_space_goes_only_at_the_start_of_a_text() -> None:
    assert pushed(STRIPPED, [1, 4, 4], []) == "hello hello"
    assert pushed(STRIPPED, [4], [], prompt=[1]) == "hello"
    assert pushed(STRIPPED, [4], [], prompt=[1, 5]) == " hello"
    assert pushed(STRIPPED, [3, 5], []) == " hello"
    assert pushed(METASPACE, [3, 4], []) == " hello"


def test_the_byte_alphabet_is_the_library_s() -> None:
    assert list(_byte_alphabet()) != []
    assert sorted(_byte_alphabet(), key=_byte_alphabet().__getitem__) == byte_alphabet()


@pytest.mark.parametrize(
    "decoder", [decoders.WordPiece(), decoders.Sequence([decoders.Replace(Regex("a"), "b"), decoders.Fuse()]), None]
)
def test_a_decoder_that_is_not_known_is_refused_by_name(decoder: Any) -> None:
    with pytest.raises(VocabularyError, match=r"decoder '.*' is not supported; supported are ByteLevel"):
        sentencepiece(decoder)


def test_a_push_costs_what_its_ids_cost() -> None:
    class Counting:
        strip = "nothing"
        asked = 0

        def __getitem__(self, index: int) -> bytes:
            self.asked += 1
            return b"x"

    table = Counting()
    decoder = Detokenizer(table, range(100_000))  # type: ignore[arg-type]
    assert table.asked < 10
    for _ in range(1000):
        decoder.push([1])
    assert table.asked < 1010
