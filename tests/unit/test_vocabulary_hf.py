"""Vocabularies read from HF checkpoint directories."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import tiny_llama

from antiphon.plugins.vocabularies import hf
from antiphon.plugins.vocabularies.errors import VocabularyError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "model")


def change(model: Path, name: str, **values: Any) -> None:
    file = model / name
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | values))


def test_a_plain_directory(model: Path) -> None:
    rules = hf.read(model)
    assert (rules.bos, rules.eos, rules.size()) == (256, (257,), 261)
    assert rules.named == {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    assert rules.tokenizer.encode("ab").ids == [97, 98]
    assert set(rules.templates) == {"default"}


def test_without_tokenizer_json_it_says_how_to_get_one(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(VocabularyError, match=r"has no tokenizer\.json.*save_pretrained"):
        hf.read(model)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", "{,"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}'),
        ("generation_config.json", '{"eos_token_id": "a"}'),
    ],
)
def test_a_file_that_does_not_parse_is_named(model: Path, name: str, content: str) -> None:
    (model / name).write_text(content)
    with pytest.raises(VocabularyError, match=str(model)):
        hf.read(model)


def test_bos_is_added_when_the_config_says_so(model: Path) -> None:
    change(model, "tokenizer_config.json", add_bos_token=True)
    assert hf.read(model).tokenizer.encode("a").ids == [256, 97]
    change(model, "tokenizer_config.json", add_bos_token=False, add_eos_token=True)
    assert hf.read(model).tokenizer.encode("a").ids == [97, 257]


def test_padding_and_truncation_of_training_are_off(model: Path) -> None:
    change(
        model,
        "tokenizer.json",
        truncation={"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        padding={
            "strategy": {"Fixed": 8},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 258,
            "pad_type_id": 0,
            "pad_token": "<pad>",
        },
    )
    assert hf.read(model).tokenizer.encode("abc").ids == [97, 98, 99]


def test_tokens_of_the_config_are_added_with_their_flags(model: Path) -> None:
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    declared = {
        "261": {"content": "<a>", "special": True, **token},
        "262": {"content": "<b>", "special": False, **token},
    }
    change(model, "tokenizer_config.json", added_tokens_decoder=declared, additional_special_tokens=["<c>"])
    tokenizer = hf.read(model).tokenizer
    added = {token.content: (i, token.special) for i, token in tokenizer.get_added_tokens_decoder().items()}
    assert {k: added[k] for k in ("<a>", "<b>", "<c>")} == {"<a>": (261, True), "<b>": (262, False), "<c>": (263, True)}


def test_special_tokens_may_be_objects_and_may_stand_in_the_old_file(model: Path) -> None:
    config = json.loads((model / "tokenizer_config.json").read_text())
    del config["bos_token"], config["eos_token"]
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": {"content": "<pad>"}}))
    change(model, "special_tokens_map.json", bos_token={"content": "<bos>"}, eos_token="<eos>")
    assert hf.read(model).named == {"bos_token": "<bos>", "eos_token": "<pad>", "pad_token": "<pad>"}


def test_answers_end_at_every_id_of_the_generation_config(model: Path) -> None:
    change(model, "generation_config.json", eos_token_id=[259, 260])
    assert hf.read(model).eos == (259, 260, 257)
    (model / "generation_config.json").unlink()
    change(model, "config.json", eos_token_id=258)
    assert hf.read(model).eos == (258, 257)


def test_templates_stand_in_the_config_or_in_files(model: Path) -> None:
    entries = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    change(model, "tokenizer_config.json", chat_template=entries)
    assert hf.read(model).templates == {"default": "a", "tool_use": "b"}
    (model / "chat_template.jinja").write_text("c")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "rag.jinja").write_text("d")
    assert hf.read(model).templates == {"default": "c", "tool_use": "b", "rag": "d"}
