"""Model files that are damaged, incomplete or not read here: each is refused with the reason and a remedy."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from antiphon.plugins.models.checkpoint import Checkpoint, CheckpointError, normal
from antiphon.plugins.models.contract import plain_shape
from antiphon.plugins.models.decoder import Decoder
from antiphon.plugins.models.families import family, open_checkpoint
from antiphon.plugins.models.gguf_blocks import decode
from antiphon.plugins.models.llama import Llama
from antiphon.plugins.models.mistral import Mistral

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
LAYER = {
    "input_layernorm": (32,),
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "post_attention_layernorm": (32,),
    "mlp.gate_proj": (64, 32),
    "mlp.up_proj": (64, 32),
    "mlp.down_proj": (32, 64),
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tensors() -> dict[str, torch.Tensor]:
    made = {"model.embed_tokens.weight": torch.randn(64, 32), "model.norm.weight": torch.ones(32)}
    for layer in range(2):
        made |= {f"model.layers.{layer}.{name}.weight": torch.randn(shape) for name, shape in LAYER.items()}
    return made


def hf(directory: Path, config: dict[str, Any] | None = None, weights: dict[str, torch.Tensor] | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    save_file(tensors() if weights is None else weights, directory / "model.safetensors")
    return directory


def sharded(directory: Path) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    made = tensors()
    where: dict[str, str] = {}
    for part, names in enumerate((list(made)[:9], list(made)[9:]), 1):
        file = f"model-{part:05}-of-00002.safetensors"
        save_file({name: made[name] for name in names}, directory / file)
        where |= dict.fromkeys(names, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return directory


def written_gguf(
    path: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    arch: str = "llama",
    drop: tuple[str, ...] = (),
    **fields: int,
) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    numbers = {
        "block_count": 2,
        "context_length": 128,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        **fields,
    }
    for key, value in numbers.items():
        if key not in drop:
            writer.add_uint32(f"{arch}.{key}" if not key.startswith("split") else key, value)
    writer.add_token_list([f"token{i}" for i in range(64)])
    for name, tensor in tensors().items():
        stem, _, _ = name.removesuffix(".weight").partition("model.layers.")
        if "layers" in name:
            _, _, layer, rest = name.removesuffix(".weight").split(".", 3)
            stored = f"blk.{layer}.{GGUF_NAMES[rest]}.weight"
        else:
            stored = f"{GGUF_NAMES[stem]}.weight"
        if stored in drop:
            continue
        data = tensor.numpy()
        matrix = data.ndim == 2 and kind != gguf.GGMLQuantizationType.F32
        if matrix:
            writer.add_tensor(stored, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def loaded(checkpoint: Checkpoint) -> Decoder:
    return Decoder(plain_shape(checkpoint.config), checkpoint, torch.float32)


def refused(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        loaded(open_checkpoint(path))
    for word in (str(path), *words):
        assert word in str(raised.value)


def test_whole_checkpoints_are_read(tmp_path: Path) -> None:
    for path in (hf(tmp_path / "one"), sharded(tmp_path / "many"), written_gguf(tmp_path / "file.gguf")):
        loaded(open_checkpoint(path))


def test_a_missing_path_names_what_is_accepted(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", "does not exist", ".gguf file")


def test_a_directory_without_config_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "config.json", "no HF model directory")


def test_a_config_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = hf(tmp_path / "m")
    (path / "config.json").write_text("{")
    refused(path, "config.json is no valid JSON")


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"])
def test_a_config_that_lacks_a_size_says_which(tmp_path: Path, key: str) -> None:
    path = hf(tmp_path / "m", {key: None})
    with pytest.raises(CheckpointError, match=key):
        loaded(open_checkpoint(path))


def test_pickled_weights_are_named_and_not_read(tmp_path: Path) -> None:
    path = hf(tmp_path / "m")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    refused(path, "pytorch_model.bin", "pickled", "convert")


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_a_truncated_safetensors_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = hf(tmp_path / "m")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(path, "model.safetensors", "truncated")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = sharded(tmp_path / "m")
    (path / "model-00002-of-00002.safetensors").unlink()
    refused(path, "model-00002-of-00002.safetensors", "missing")


def test_an_index_that_promises_too_much_is_refused(tmp_path: Path) -> None:
    path = sharded(tmp_path / "m")
    file = path / "model.safetensors.index.json"
    listing = json.loads(file.read_text())
    listing["weight_map"]["lm_head.weight"] = "model-00001-of-00002.safetensors"
    file.write_text(json.dumps(listing))
    refused(path, "lm_head.weight", "promises")


def test_an_index_cannot_lead_out_of_its_directory(tmp_path: Path) -> None:
    path = sharded(tmp_path / "m")
    file = path / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": {"x": "../other.safetensors"}}))
    refused(path, "../other.safetensors", "no plain file name")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    made = tensors()
    del made["model.layers.1.mlp.up_proj.weight"]
    refused(hf(tmp_path / "m", weights=made), "model.layers.1.mlp.up_proj.weight", "incomplete")


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    made = tensors()
    made["model.layers.0.self_attn.k_proj.weight"] = torch.randn(32, 32)
    refused(hf(tmp_path / "m", weights=made), "self_attn.k_proj.weight", "[32, 32]", "[16, 32]")


def test_a_tensor_that_no_layer_uses_is_refused(tmp_path: Path) -> None:
    made = tensors()
    made["model.layers.0.self_attn.q_proj.bias"] = torch.randn(32)
    refused(hf(tmp_path / "m", weights=made), "self_attn.q_proj.bias", "no use")


def test_integer_weights_are_refused_by_type(tmp_path: Path) -> None:
    made = tensors()
    made["model.norm.weight"] = torch.ones(32, dtype=torch.int8)
    refused(hf(tmp_path / "m", weights=made), "model.norm.weight", "I8", "BF16")


def test_a_quantized_hf_checkpoint_is_refused_by_method(tmp_path: Path) -> None:
    refused(hf(tmp_path / "m", {"quantization_config": {"quant_method": "gptq"}}), "gptq")


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(hf(tmp_path / "m", {"architectures": ["FuturaForCausalLM"]}))
    with pytest.raises(CheckpointError, match=r"FuturaForCausalLM.*LlamaForCausalLM.*MistralForCausalLM"):
        family(checkpoint)
    with pytest.raises(CheckpointError, match=r"futura.*llama"):
        family(open_checkpoint(written_gguf(tmp_path / "m.gguf", arch="futura")))
    assert family(open_checkpoint(hf(tmp_path / "l"))) == "llama"
    assert family(open_checkpoint(hf(tmp_path / "n", {"architectures": ["MistralForCausalLM"]}))) == "mistral"
    assert family(open_checkpoint(written_gguf(tmp_path / "l.gguf"))) == "llama"


def test_unknown_rope_scaling_and_activation_are_refused_by_name(tmp_path: Path) -> None:
    scaling = {"rope_scaling": {"type": "spiral", "factor": 2.0}}
    with pytest.raises(CheckpointError, match="spiral"):
        loaded(open_checkpoint(hf(tmp_path / "a", scaling)))
    with pytest.raises(CheckpointError, match="wobble"):
        loaded(open_checkpoint(hf(tmp_path / "b", {"hidden_act": "wobble"})))


@pytest.mark.parametrize("keep", [4, 30, 300, 2000, -100])
def test_a_truncated_gguf_is_refused(tmp_path: Path, keep: int) -> None:
    path = written_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    refused(path, "truncated")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip file, say", b"\x00" * 64])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    refused(path, "no GGUF file")


def test_an_unsupported_gguf_type_is_refused_by_name(tmp_path: Path) -> None:
    path = written_gguf(tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q5_0)
    refused(path, "Q5_0", "Q4_0, Q4_1, Q8_0")


def test_a_gguf_without_a_size_or_a_tensor_says_which(tmp_path: Path) -> None:
    refused(written_gguf(tmp_path / "a.gguf", drop=("block_count",)), "block_count")
    refused(written_gguf(tmp_path / "b.gguf", drop=("blk.1.ffn_up.weight",)), "model.layers.1.mlp.up_proj.weight")


def test_split_and_expert_ggufs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "split.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 3)
    writer.add_tensor("token_embd.weight", np.ones((64, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(path, "llama-gguf-split --merge")
    experts = open_checkpoint(written_gguf(tmp_path / "moe.gguf", expert_count=8))
    with pytest.raises(CheckpointError, match="8 experts"):
        Llama.shape(Llama.__new__(Llama), experts.config)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_decoded_blocks_equal_the_library_s(kind: str) -> None:
    numbers = np.random.default_rng(0).normal(size=(6, 96)).astype(np.float32)
    stored = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[kind])
    expected = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind])
    found = decode(torch.from_numpy(stored.view(np.uint8)), kind)
    assert torch.equal(found.to(torch.float32), torch.from_numpy(np.array(expected)))


def test_digests_tell_checkpoints_apart_and_stay(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = tensors()
    first = open_checkpoint(hf(tmp_path / "a", weights=weights)).digest()
    assert open_checkpoint(hf(tmp_path / "a2", weights=weights)).digest() == first
    assert open_checkpoint(hf(tmp_path / "b", {"rope_theta": 5e5}, weights)).digest() != first
    changed = {**weights, "model.layers.1.mlp.down_proj.weight": torch.randn(32, 64)}
    assert open_checkpoint(hf(tmp_path / "c", weights=changed)).digest() != first
    one = open_checkpoint(written_gguf(tmp_path / "a.gguf")).digest()
    assert open_checkpoint(written_gguf(tmp_path / "b.gguf")).digest() != one
    assert open_checkpoint(tmp_path / "a.gguf").digest() == one


def test_old_and_new_spellings_of_a_config_agree() -> None:
    old = normal({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}, "eos_token_id": 2})
    new = normal({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}, {"eos_token_id": [2]})
    assert old["rope_parameters"] == new["rope_parameters"]
    assert old["eos_token_id"] == new["eos_token_id"] == [2]


def test_mistral_windows_follow_the_config() -> None:
    def window(**config: Any) -> int:
        return Mistral.shape(Mistral.__new__(Mistral), normal({**CONFIG, **config})).window(1)

    assert window(sliding_window=16) == 16
    assert window(sliding_window=None) == 0
    assert window(sliding_window=4096) == 0  # longer than the context
    assert window(max_position_embeddings=32768) == 4096  # HF's default where the config is silent
