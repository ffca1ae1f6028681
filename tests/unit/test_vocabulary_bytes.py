"""The vocabulary of bytes, and the one that finds a model's own."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import tiny_llama

from antiphon.actors.model import ModelSection
from antiphon.actors.tokenizer import TemplateError
from antiphon.plugins.catalogue.errors import CatalogueError
from antiphon.plugins.vocabularies.auto import Auto, AutoOptions
from antiphon.plugins.vocabularies.bytes import Bytes, BytesOptions
from antiphon.plugins.vocabularies.errors import VocabularyError
from antiphon.runtime.plugin import find


class Site:
    """A site that knows one model path."""

    instance = "tokenizer"
    log: Any = None

    def __init__(self, path: object = ""):
        self.model = ModelSection(path=str(path))

    def section(self, name: str) -> Any:
        return self.model

    def service(self, name: str) -> Any:
        raise NotImplementedError

    def build(self, kind: str, use: Any) -> Any:
        raise NotImplementedError


def vocabulary(**options: Any) -> Bytes:
    return Bytes(BytesOptions(**options), Site())


def test_a_token_is_a_byte() -> None:
    assert vocabulary().encode("aé") == [97, 195, 169]
    assert vocabulary(bos=True).encode("a") == [257, 97]
    assert vocabulary().facts() == {"size": 512, "eos": [256], "bos": None, "template": True}
    with pytest.raises(VocabularyError, match="lone surrogate"):
        vocabulary().encode("\ud800")


def test_a_conversation_is_a_line_for_each_message() -> None:
    parts = [{"type": "text", "text": "u"}]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    assert bytes(vocabulary().encode_chat(messages)) == b"system: s\nuser: u\nassistant: "
    assert bytes(vocabulary().encode_chat(messages[1:], [{"n": 1}])) == b'tools: [{"n":1}]\nuser: u\nassistant: '
    wrong: list[Any] = [[], [{}], ["x"]]
    for messages in wrong:
        with pytest.raises(TemplateError):
            vocabulary().encode_chat(messages)


def test_every_id_can_be_read() -> None:
    decoder = vocabulary().decoder([195])
    assert decoder.push([169, 256, 258, 259, 511, 226, 130]) == "é一\u4efc"
    assert decoder.push([256, 172]) == "€"
    assert decoder.push([226]) + decoder.finish() == "\ufffd"


@pytest.mark.parametrize("size", [0, 258, 10**6])
def test_a_size_without_room_or_signs_is_refused(size: int) -> None:
    with pytest.raises(VocabularyError, match=f"size is {size}; it may be 259 to"):
        vocabulary(size=size)


def test_both_are_found_by_name() -> None:
    assert find("vocabulary", "bytes") is Bytes
    assert find("vocabulary", "auto") is Auto


def test_auto_reads_what_the_model_path_names(tmp_path: Path) -> None:
    auto = Auto(AutoOptions(), Site(tiny_llama(tmp_path / "model")))
    assert auto.facts() == {"size": 261, "eos": [257], "bos": 256, "template": True}
    ids = auto.encode_chat([{"role": "user", "content": "é"}])
    assert ids == [256, 259, 195, 169, 260]
    assert auto.decoder(ids[:3]).push(ids[3:]) == "é"
    with pytest.raises(CatalogueError, match="there is no model"):
        Auto(AutoOptions(), Site(tmp_path / "nothing"))


def test_auto_limits_its_template(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ 'a' * 100 }}")
    auto = Auto(AutoOptions(template_characters=99), Site(model))
    with pytest.raises(TemplateError, match="more than 99 characters"):
        auto.encode_chat([{"role": "user", "content": "a"}])


def test_vocabularies_load_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, antiphon.plugins.vocabularies.auto, antiphon.plugins.vocabularies.bytes;"
        "assert not {'torch', 'transformers', 'tqdm'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
