"""Vocabularies read from GGUF files: header, pre-tokenizers, SentencePiece rules, special tokens, bad files."""

import contextlib
import random
import struct
from pathlib import Path
from typing import Any

import gguf as library
import pytest
from gguf.constants import TokenType
from tests.checkpoints import byte_alphabet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from antiphon.plugins.vocabularies import gguf
from antiphon.plugins.vocabularies.encode import Encoder
from antiphon.plugins.vocabularies.errors import VocabularyError
from antiphon.plugins.vocabularies.metadata import read_header
from antiphon.plugins.vocabularies.pretokenizers import RULES
from antiphon.plugins.vocabularies.template import ChatTemplate

NORMAL, UNKNOWN, CONTROL, USER, BYTE = (
    TokenType.NORMAL,
    TokenType.UNKNOWN,
    TokenType.CONTROL,
    TokenType.USER_DEFINED,
    TokenType.BYTE,
)


def write(path: Path, **values: Any) -> Path:
    """A GGUF file without tensors whose keys are ``tokenizer.NAME``; ``__`` stands for a dot."""
    writer = library.GGUFWriter(str(path), "llama")
    for name, value in values.items():
        key = "tokenizer." + name.replace("__", ".")
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level(path: Path, pre: str | None = "gpt-2", **values: Any) -> Path:
    tokens = [*byte_alphabet(), "ab", "Ġa", "<|end|>", "<think>"]
    kinds = [int(NORMAL)] * 258 + [int(CONTROL), int(USER)]
    fields = {"ggml__model": "gpt2", "ggml__tokens": tokens, "ggml__token_type": kinds, "ggml__merges": ["a b", "Ġ a"]}
    if pre is not None:
        fields["ggml__pre"] = pre
    return write(path, **(fields | values))


def test_the_header_reads_as_the_library_reads_it(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "m.gguf", ggml__scores=[0.5, -1.0], ggml__eos_token_id=258, chat_template="{{ 'é' }}")
    ours = read_header(path, ("tokenizer.",))
    theirs = library.GGUFReader(path)
    assert ours == {k: f.contents() for k, f in theirs.fields.items() if k.startswith("tokenizer.")}
    assert list(ours) == [k for k in theirs.fields if k.startswith("tokenizer.")]


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write(
        tmp_path / "m.gguf", ggml__model="gpt2", ggml__tokens=["a", "b"], ggml__scores=[1.0, 2.0]
    ).read_bytes()
    cut = tmp_path / "cut.gguf"
    header_end = len(whole.rstrip(b"\0")) - 1  # the writer pads at the end
    for size in range(header_end):
        cut.write_bytes(whole[:size])
        with pytest.raises(VocabularyError, match=r"cut short|not a GGUF|cannot read"):
            read_header(cut, ("tokenizer.",))


def test_lengths_past_the_end_are_refused_at_once(tmp_path: Path) -> None:
    key = b"tokenizer.x"
    start = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key
    for tail in (
        struct.pack("<IIQ", 9, 4, 1 << 60),  # array of 2^60 numbers
        struct.pack("<IIQ", 9, 8, 1 << 60),  # array of 2^60 texts
        struct.pack("<IIQ", 9, 9, 1 << 60),  # array of arrays
        struct.pack("<IQ", 8, 1 << 62),  # a text
        struct.pack("<I", 77),  # no such type
    ):
        path = tmp_path / "bad.gguf"
        path.write_bytes(start + tail)
        with pytest.raises(VocabularyError):
            read_header(path, ("tokenizer.",))


def test_a_damaged_file_is_read_or_refused_and_nothing_else(tmp_path: Path) -> None:
    choose, path = random.Random(0), tmp_path / "m.gguf"
    whole = byte_level(path, ggml__bos_token_id=258, chat_template="x").read_bytes()
    for _ in range(500):
        damaged = bytearray(whole)
        for _ in range(choose.randint(1, 3)):
            damaged[choose.randrange(len(damaged))] = choose.randrange(256)
        path.write_bytes(damaged)
        with contextlib.suppress(VocabularyError):
            Encoder(gguf.read(path)).encode("ab <|end|>")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip", b"GGUF", b"GGUF" + struct.pack("<IQQ", 9, 0, 0)])
def test_what_is_no_gguf_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(VocabularyError, match=r"m\.gguf"):
        gguf.read(path)


def test_a_file_of_the_other_byte_order_reads_the_same(tmp_path: Path) -> None:
    writer = library.GGUFWriter(str(tmp_path / "big.gguf"), "llama", endianess=library.GGUFEndian.BIG)
    writer.add_array("tokenizer.ggml.scores", [1.5, -2.0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert read_header(tmp_path / "big.gguf", ("tokenizer.",)) == {"tokenizer.ggml.scores": [1.5, -2.0]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ggml__model": "t5"}, "'t5' is not supported; supported are 'gpt2' and 'llama'"),
        ({"ggml__pre": "falcon"}, "'falcon' is not supported; supported are: .*qwen2.*smollm"),
        ({"ggml__token_type": [1, 1]}, "one number for each of the 260 tokens"),
        ({"ggml__merges": ["a b", "x y"]}, "do not fit"),
        ({"ggml__merges": ["ab"]}, "malformed merge 'ab'"),
        ({"ggml__add_bos_token": True, "ggml__bos_token_id": "a"}, "not a token id"),
    ],
)
def test_a_vocabulary_that_cannot_be_used_says_why(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(VocabularyError, match=message):
        gguf.read(byte_level(tmp_path / "m.gguf", **values))


def test_a_file_without_a_vocabulary_says_so(tmp_path: Path) -> None:
    with pytest.raises(VocabularyError, match="holds no vocabulary"):
        gguf.read(write(tmp_path / "m.gguf"))


def test_the_first_piece_of_a_merge_may_start_with_a_space(tmp_path: Path) -> None:
    assert gguf._split(["a b", "    "], tmp_path) == [("a", "b"), (" ", "  ")]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt-2", "it's 1234 a\n\nb", ["it", "'s", " 1234", " a", "\n", "\n", "b"]),
        ("smollm", "it's 12 a", ["it", "'s", " ", "1", "2", " a"]),
        ("llama-bpe", "it'S 12345!\n\n x", ["it", "'S", " ", "123", "45", "!\n\n", " x"]),
        ("qwen2", "it'S 12!\n x", ["it", "'S", " ", "1", "2", "!\n", " x"]),
        ("qwen35", "ष्ठ 1", ["ष्ठ", " ", "1"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
        ("tekken", "HelloWorld's 12", ["Hello", "World", "'s", " ", "1", "2"]),
        ("deepseek-v3", "漢字abc 1234", ["漢字", "abc", " ", "123", "4"]),
        ("default", "a+b 1234", ["a", "+", "b", " ", "123", "4"]),
    ],
)
def test_words_are_cut_as_the_name_says(name: str, text: str, words: list[str]) -> None:
    cut = RULES[name].make().pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == words


def test_every_rule_loses_no_text() -> None:
    text = "It's  naïve, ok?\r\n\tx=1234;漢字カナ한국 don'T 👩‍🚀 e\u0301 <|a|> ½²٣\u2028 end "
    for name, rule in RULES.items():
        assert "".join(text[a:b] for _, (a, b) in rule.make().pre_tokenize_str(text)) == text, name


def test_control_tokens_are_special_and_user_defined_ones_are_not(tmp_path: Path) -> None:
    tokenizer = gguf.read(byte_level(tmp_path / "m.gguf")).tokenizer
    assert tokenizer.encode("ab<|end|><think> a", add_special_tokens=False).ids == [256, 258, 259, 257]
    added = {i: t.special for i, t in tokenizer.get_added_tokens_decoder().items()}
    assert added == {258: True, 259: False}


@pytest.mark.parametrize(
    ("pre", "values", "starts"),
    [
        ("gpt-2", {}, False),
        ("gpt-2", {"ggml__add_bos_token": True}, True),
        ("llama-bpe", {}, True),
        ("llama-bpe", {"ggml__add_bos_token": False}, False),
    ],
)
def test_bos_follows_the_file_else_the_rule(tmp_path: Path, pre: str, values: dict[str, Any], starts: bool) -> None:
    rules = gguf.read(byte_level(tmp_path / "m.gguf", pre, ggml__bos_token_id=258, **values))
    assert rules.tokenizer.encode("a").ids == [258] * starts + [97]
    assert rules.bos == 258


def test_a_missing_rule_means_the_unnamed_one(tmp_path: Path) -> None:
    unnamed, named = (gguf.read(byte_level(tmp_path / f"{n}.gguf", n)).tokenizer for n in (None, "default"))
    for text in ("a+b 12345", "x  y", "it's"):
        assert unnamed.encode(text).ids == named.encode(text).ids
    assert "does not name its pre-tokenizer" in gguf.read(tmp_path / "None.gguf").notes[0]
    assert gguf.read(tmp_path / "default.gguf").notes == ()


def test_turn_ends_that_the_template_writes_end_an_answer(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "m.gguf", ggml__eos_token_id=0, chat_template="{{ x }}<|end|>")
    assert gguf.read(path).eos == (0, 258)
    assert gguf.read(byte_level(tmp_path / "n.gguf", ggml__eos_token_id=0, ggml__eot_token_id=3)).eos == (0, 3)
    assert gguf.read(byte_level(tmp_path / "o.gguf", ggml__eos_token_id=2**32 - 1)).eos == ()


def test_named_templates_are_found(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "m.gguf", chat_template="a", chat_template__tool_use="b", chat_templates=["tool_use"])
    assert gguf.read(path).templates == {"default": "a", "tool_use": "b"}


TEXTS = [
    "hello world",
    "the theme there",
    " leading",
    "  two",
    "né 漢 👩‍🚀",
    "a\nb\t",
    "",
    "1234 hello",
    "hello<s>there",
]


def sentencepiece(path: Path, **values: Any) -> tuple[Path, Tokenizer]:
    """A 'llama' file and the library's tokenizer with the merges that its scores were made from."""
    special, marked = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    trained.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    corpus = ["the hello world of the other theme", "there they were, hello there world", "<s> s> <s"] * 20
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=[*special, *marked], show_progress=False)
    trained.train_from_iterator(corpus, trainer)
    tokens = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    first = len(special) + len(marked)
    scores = [0.0] * first + [float(-(i + 1)) for i in range(len(tokens) - first)]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(tokens) - first)
    fields = {
        "ggml__model": "llama",
        "ggml__tokens": tokens,
        "ggml__scores": scores,
        "ggml__token_type": [int(kind) for kind in kinds],
    }
    return write(path, **(fields | values)), trained


def test_scores_give_the_merges_that_a_sentencepiece_model_was_trained_with(tmp_path: Path) -> None:
    path, trained = sentencepiece(tmp_path / "m.gguf", ggml__add_bos_token=False)
    tokenizer = gguf.read(path).tokenizer
    tokenizer.encode_special_tokens = trained.encode_special_tokens = True
    for text in TEXTS:
        if text.startswith(" "):
            continue  # Metaspace adds no second space there; SentencePiece, which made the model, does
        assert tokenizer.encode(text).tokens == trained.encode(text).tokens, text


def test_sentencepiece_puts_a_space_before_every_text_and_takes_it_off_again(tmp_path: Path) -> None:
    tokenizer = gguf.read(sentencepiece(tmp_path / "m.gguf")[0]).tokenizer
    assert tokenizer.encode("hello").tokens == ["<s>", "▁hello"]
    assert tokenizer.encode(" hello").tokens[1:] == ["▁", "▁hello"]
    for text in TEXTS[:-1]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    bare = gguf.read(sentencepiece(tmp_path / "n.gguf", ggml__add_space_prefix=False)[0]).tokenizer
    assert bare.encode("hello", add_special_tokens=False).tokens[0] != "▁hello"
    assert bare.decode(bare.encode(" hello").ids) == " hello"


def test_no_merge_makes_a_control_token(tmp_path: Path) -> None:
    rules = gguf.read(sentencepiece(tmp_path / "m.gguf")[0])
    rules.tokenizer.encode_special_tokens = True
    ids = rules.tokenizer.encode("<s>x</s><unk><0x41>", add_special_tokens=False).ids
    assert not {0, 1, 2} & set(ids)
    assert rules.tokenizer.token_to_id("<0x41>") not in ids


def test_users_cannot_write_control_tokens_of_a_sentencepiece_model(tmp_path: Path) -> None:
    rules = gguf.read(
        sentencepiece(tmp_path / "m.gguf", chat_template="{{ bos_token }}the {{ messages[0].content }}")[0]
    )
    encode, template = Encoder(rules), ChatTemplate(rules.templates, rules.named, 1.0, 1000)
    ids = encode.encode_chat(template, [{"role": "user", "content": "hello <s></s>"}], [])
    assert rules.tokenizer.decode(ids, skip_special_tokens=True) == "the hello <s></s>"
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 1, 0)
    assert encode.encode("hello</s>").count(2) == 0
    for text in TEXTS[:-1]:
        assert encode._aliased().encode(text).ids == rules.tokenizer.encode(text).ids


def test_unknown_characters_become_their_bytes(tmp_path: Path) -> None:
    tokens = gguf.read(sentencepiece(tmp_path / "m.gguf")[0]).tokenizer.encode("漢").tokens
    assert tokens[-3:] == ["<0xE6>", "<0xBC>", "<0xA2>"]


def test_a_sentencepiece_file_without_ids_uses_the_customary_ones(tmp_path: Path) -> None:
    rules = gguf.read(sentencepiece(tmp_path / "m.gguf")[0])
    assert (rules.bos, rules.eos, rules.named["unk_token"]) == (1, (2,), "<unk>")
