"""Logits and greedy tokens agree with HF transformers in float32, on the default model and on tiny random ones.

HF reads prompt and our continuation in one pass. Where every argmax of that pass is our next token, HF's own greedy
run gives the same tokens, by induction.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.checkpoints import gguf_file, hf_checkpoint, tiny_llama
from tests.numerics.driver import Driver, Rows
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from antiphon.plugins.models.families import open_checkpoint

logging.set_verbosity_error()  # type: ignore[no-untyped-call]
logging.disable_progress_bar()  # type: ignore[no-untyped-call]

MOST = 1e-3  # greatest difference of logits that the project allows; found are some 1e-4
SENTENCES = [
    "Why is the sky blue?",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived a",
    "Water boils at 100 degrees, and at high altitude",
    "1, 1, 2, 3, 5, 8, 13,",
    "Translate to French: good morning, my friend.",
    "The three primary colours are red,",
    "To make bread you need flour, water, salt and",
    "In 1969, two people",
]
CHUNKS = (3, 1, 7, 2, 11, 5)


def hf(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    torch.set_num_threads(1)
    name = {"gguf_file": path.name} if path.is_file() else {}
    model: Any = AutoModelForCausalLM.from_pretrained(path.parent if name else path, dtype=dtype, **name)
    return model.eval()


def read(model: Any, ids: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([list(ids)])).logits[0].float()
    return found


def assert_same(
    model: Any, driver: Driver, prompts: Sequence[Sequence[int]], tokens: int, chunks: Sequence[int]
) -> float:
    """Greedy runs agree token by token and every row's logits within MOST; the greatest difference."""
    greatest = 0.0
    for prompt, (ids, logits) in zip(prompts, driver.greedy(prompts, tokens, chunks), strict=True):
        expected = read(model, [*prompt, *ids[:-1]])
        greatest = max(greatest, float((expected - logits).abs().max()))
        assert expected[len(prompt) - 1 :].argmax(dim=1).tolist() == ids
    assert greatest < MOST
    return greatest


def smollm_prompts(count: int) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(hf_checkpoint() / "tokenizer.json"))
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    texts = [form.format(text) for form in ("{}", chat) for text in SENTENCES]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts][-count:]


@pytest.fixture(scope="module", params=["hf", "gguf"])
def smollm(request: Any) -> tuple[Any, Driver]:
    path = hf_checkpoint() if request.param == "hf" else gguf_file()
    return hf(path), Driver(path, blocks=400)


def test_twenty_greedy_runs_of_the_default_model_agree(smollm: tuple[Any, Driver]) -> None:
    greatest = assert_same(*smollm, smollm_prompts(20), 64, CHUNKS)
    print(f"greatest difference {greatest:.1e}")


def test_the_default_model_is_described_from_its_header(smollm: tuple[Any, Driver]) -> None:
    facts = smollm[1].facts
    assert (facts.vocabulary, facts.context, facts.layers, facts.hidden) == (49152, 8192, 30, 576)
    assert [(g.name, g.layers, g.heads, g.width, g.window) for g in facts.groups] == [("full", 30, 3, 64, 0)]
    assert facts.eos == (2,)
    assert len(facts.digest) == 64


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "one kv head": {"num_key_value_heads": 1},
    "as many kv heads": {"num_key_value_heads": 4},
    "eight heads to two": {"num_attention_heads": 8},
    "wide heads": {"head_dim": 24},
    "attention biases": {"attention_bias": True},
    "mlp biases": {"mlp_bias": True, "attention_bias": True},
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "theta": {"rope_theta": 500000.0},
    "linear rope": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama 3 rope": {
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "sharded": {"max_shard_size": 50_000},
    "stored in bfloat16": {"dtype": "bfloat16"},
    "stored in float16": {"dtype": "float16"},
    "mistral": {"family": "mistral", "sliding_window": None},
    "mistral window": {"family": "mistral", "sliding_window": 24},
    "ministral of two groups": {
        "family": "ministral",
        "head_dim": 16,  # HF's default is none
        "num_hidden_layers": 3,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "mistral window of one block": {"family": "mistral", "sliding_window": 8},
}


def tiny_prompts(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(1)
    return [random.integers(0, 256, length).tolist() for length in lengths]


@pytest.mark.parametrize("attention", ["cpu", "reference"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_tiny_models_agree(tmp_path: Path, variant: str, attention: str) -> None:
    path = tiny_llama(tmp_path / "m", tokenizer=False, **VARIANTS[variant])
    assert variant != "sharded" or len(list(path.glob("*.safetensors"))) > 2
    driver = Driver(path, attention={"plugin": attention})
    print(assert_same(hf(path), driver, tiny_prompts(90, 9, 33), 40, CHUNKS))


def test_windowed_layers_get_a_group_of_their_own(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m", tokenizer=False, family="mistral", sliding_window=24)
    assert [(g.name, g.layers, g.window) for g in Driver(path).facts.groups] == [("window-24", 2, 24)]


def test_unpacked_weights_give_the_same(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m", tokenizer=False)
    assert_same(hf(path), Driver(path, pack=False), tiny_prompts(20), 20, CHUNKS)


def interleaved(matrix: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of query or key heads in llama.cpp's order: the two halves of a head alternate."""
    half = matrix.shape[0] // heads // 2
    return np.ascontiguousarray(matrix.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(matrix.shape))


def as_gguf(source: Path, target: Path, kind: str = "F32", factors: torch.Tensor | None = None) -> Path:
    """Write a tiny HF checkpoint as llama.cpp's converter would."""
    checkpoint = open_checkpoint(source)
    config = checkpoint.config
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_eos_token_id(257)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    quantization = gguf.GGMLQuantizationType[kind]
    for name in checkpoint.index:
        data = checkpoint.tensor(name, torch.float32).numpy()
        if ".q_proj." in name or ".k_proj." in name:
            heads = config["num_attention_heads"] if ".q_proj." in name else config["num_key_value_heads"]
            data = interleaved(data, heads)
        stored = str(names.get_name(name, try_suffixes=(".weight", ".bias")))
        if data.ndim == 2:
            writer.add_tensor(stored, gguf.quants.quantize(data, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(stored, data)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_every_gguf_type_agrees_with_hf_s_reading_of_the_file(tmp_path: Path, kind: str) -> None:
    path = as_gguf(tiny_llama(tmp_path / "m", tokenizer=False), tmp_path / "m.gguf", kind)
    assert_same(hf(path), Driver(path), tiny_prompts(30), 20, CHUNKS)


def test_rope_factors_and_biases_of_a_gguf_are_those_of_the_hf_checkpoint(tmp_path: Path) -> None:
    """HF's own GGUF reader drops both, so the model they came from is the measure."""
    source = tiny_llama(tmp_path / "m", tokenizer=False, attention_bias=True, **VARIANTS["llama 3 rope"])
    model = hf(source)
    inverse = model.model.rotary_emb.inv_freq
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2).float() / 16)
    path = as_gguf(source, tmp_path / "m.gguf", factors=plain / inverse)
    assert_same(model, Driver(path), tiny_prompts(90), 20, CHUNKS)


def test_bfloat16_strays_no_further_than_hf_s() -> None:
    path = hf_checkpoint()
    prompts = smollm_prompts(8)
    exact, rounded = Driver(path, blocks=400), Driver(path, dtype="bfloat16", blocks=400)
    truth = torch.cat([logits for _, logits in exact.feed(prompts)])
    found = torch.cat([logits for _, logits in rounded.feed(prompts, CHUNKS)])
    model = hf(path, torch.bfloat16)
    theirs = torch.cat([read(model, prompt) for prompt in prompts])
    stray, allowed = float((found - truth).abs().mean()), float((theirs - truth).abs().mean())
    print(f"mean difference to float32: {stray:.3f}, HF's {allowed:.3f}")
    assert stray < 1.25 * allowed
    assert float((found.argmax(1) == truth.argmax(1)).float().mean()) > 0.9


def test_hidden_states_are_those_of_hf(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m", tokenizer=False, num_hidden_layers=3)
    driver, ids = Driver(path), tiny_prompts(21)[0]
    names = ("input:0", "output:0", "input:1", "input:2", "output:2")
    sequence = driver.open()
    first = driver.step([Rows(sequence, ids[:10])], "none", names)
    driver.commit(sequence, range(10))
    second = driver.step([Rows(sequence, ids[10:])], "last", names)
    with torch.inference_mode():
        model = hf(path)
        expected = model(torch.tensor([ids]), output_hidden_states=True)
        states = expected.hidden_states
        normed = model.model.norm(torch.cat([first.hidden["output:2"], second.hidden["output:2"]]))
    for name, state in (
        ("input:0", states[0]),
        ("output:0", states[1]),
        ("input:1", states[1]),
        ("input:2", states[2]),
    ):
        found = torch.cat([first.hidden[name], second.hidden[name]])
        torch.testing.assert_close(found, state[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(normed, states[3][0], atol=1e-4, rtol=1e-4)  # HF's last one is normed
    torch.testing.assert_close(second.logits[0], expected.logits[0, -1], atol=1e-4, rtol=1e-4)
    assert first.logits.shape == (0, 272)
