"""Model files for tests: the default model as GGUF and as an HF checkpoint, and tiny models with random weights.

It does not know what is tested. The large checkpoint is written once, in a process of its own so that a test run stays
small, and kept under Antiphon's cache directory.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from antiphon.plugins.catalogue.catalogue import home, resolve

DEFAULT = "smollm2-135m-instruct"
_VERSION = 1  # of what hf_checkpoint writes; a new one is written beside the old


def gguf_file() -> Path:
    """The default model's GGUF file, fetched at first use."""
    return resolve(DEFAULT, progress=False)


def hf_checkpoint() -> Path:
    """The default model as an HF checkpoint: the de-quantized weights in bfloat16, HF's own tokenizer files.

    Written once, in about 30 s and 1.9 GB of memory, then 270 MB on disk.
    """
    place = home() / "tests" / f"{DEFAULT}-hf-v{_VERSION}"
    if place.is_dir():
        return place
    source = gguf_file()
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with its holder; pytest's own time limit bounds the wait
        if not place.is_dir():
            draft = place.with_suffix(".part")
            shutil.rmtree(draft, ignore_errors=True)
            _child(str(source), str(draft))
            draft.replace(place)
    return place


def tiny_llama(
    directory: Path,
    *,
    family: str = "llama",
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: int = 0,
    tokenizer: bool = True,
    **config: Any,
) -> Path:
    """Write a small HF checkpoint with seeded random weights into ``directory`` in milliseconds; returns it.

    ``family`` is "llama", "mistral" or "ministral", ``dtype`` "float32", "float16" or "bfloat16"; ``config`` overrides
    or adds fields of the HF config. ``max_shard_size`` in bytes splits the safetensors (0: one file). The tokenizer is
    of bytes (ids 0-255) with ``<bos>`` 256, ``<eos>`` 257, ``<pad>`` 258, ``<|user|>`` 259, ``<|assistant|>`` 260 and a
    chat template.
    """
    fields: dict[str, Any] = {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "vocab_size": 272,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
        # HF's own 0.02 makes logits nearly flat, so that two wrong models agree; this spreads them.
        "initializer_range": 0.2,
    } | config
    fields["dtype"] = dtype
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields, indent=1), encoding="utf-8")
    generation = {name: fields[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (directory / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    random = np.random.default_rng(seed)
    tensors = {
        # Norm weights of exactly one would hide that they are not applied.
        name: random.standard_normal(shape, np.float32) * fields["initializer_range"]
        + (len(shape) == 1) * ("norm" in name)
        for name, shape in _shapes(fields).items()
    }
    _write_safetensors(directory, tensors, dtype, max_shard_size)
    if tokenizer:
        _write_byte_tokenizer(directory)
    return directory


def _shapes(fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor, by the name that HF gives it; matrices are [out, in]."""
    hidden, inner, heads = fields["hidden_size"], fields["intermediate_size"], fields["num_attention_heads"]
    width = fields.get("head_dim") or hidden // heads
    query, key = heads * width, fields["num_key_value_heads"] * width
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (fields["vocab_size"], hidden)}
    for layer in range(fields["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for group, bias, sizes in (
            (
                "self_attn",
                "attention_bias",
                {"q": (query, hidden), "k": (key, hidden), "v": (key, hidden), "o": (hidden, query)},
            ),
            ("mlp", "mlp_bias", {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}),
        ):
            for name, shape in sizes.items():
                shapes[f"{prefix}{group}.{name}_proj.weight"] = shape
                if fields.get(bias):
                    shapes[f"{prefix}{group}.{name}_proj.bias"] = shape[:1]
    shapes["model.norm.weight"] = (hidden,)
    if not fields["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (fields["vocab_size"], hidden)
    return shapes


def _write_safetensors(directory: Path, tensors: dict[str, Any], dtype: str, max_shard_size: int) -> None:
    shards: list[dict[str, Any]] = [{}]
    size = total = 0
    for name, tensor in tensors.items():
        taken = tensor.size * (4 if dtype == "float32" else 2)
        if max_shard_size and shards[-1] and size + taken > max_shard_size:
            shards.append({})
            size = 0
        size, total = size + taken, total + taken
        shards[-1][name] = tensor
    names = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        weights = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    for name, shard in zip(names, shards, strict=True):
        if dtype == "bfloat16":  # NumPy has none
            import torch
            from safetensors.torch import save_file as save_torch

            halves = {key: torch.from_numpy(tensor).bfloat16() for key, tensor in shard.items()}
            save_torch(halves, directory / name, {"format": "pt"})
        else:
            save_file({key: tensor.astype(dtype) for key, tensor in shard.items()}, directory / name, {"format": "pt"})


def byte_alphabet() -> list[str]:
    """The character in which byte-level BPE writes each byte: itself if printable, else the next from U+0100 on."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    itself = {ord(character): character for character in alphabet if ord(character) < 0x100}
    others = iter(character for character in alphabet if ord(character) >= 0x100)
    return [itself[byte] if byte in itself else next(others) for byte in range(256)]


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% if m['role'] == 'assistant' %}"
    "{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _write_byte_tokenizer(directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = [*byte_alphabet(), "<bos>", "<eos>", "<pad>", "<|user|>", "<|assistant|>"]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens[256:]])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def _child(*arguments: str) -> None:
    """Run this file as a program; raise with what it said if it fails."""
    environment = os.environ | {"PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, __file__, *arguments], env=environment, capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        raise RuntimeError(f"writing {arguments[-1]}: exit status {done.returncode}\n{done.stderr[-4000:]}")


def _write_hf(source: Path, place: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(2)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in loaded.state_dict().items()}
    config = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    # A model that came from GGUF refuses to be saved, so its weights move into one that did not.
    plain = type(loaded)(type(loaded.config).from_dict(config | {"dtype": "bfloat16"})).bfloat16()
    del loaded
    plain.load_state_dict(weights, strict=True)
    plain.tie_weights()
    generation = plain.generation_config
    generation.bos_token_id, generation.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    generation.pad_token_id = tokenizer.pad_token_id
    plain.save_pretrained(place)
    tokenizer.save_pretrained(place)
    # GGUF's 'smollm' splits digits one by one before the byte level; the conversion above forgets that.
    file = place / "tokenizer.json"
    state = json.loads(file.read_text(encoding="utf-8"))
    if state["pre_tokenizer"]["type"] == "ByteLevel":
        digits = {"type": "Digits", "individual_digits": True}
        state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, state["pre_tokenizer"]]}
        file.write_text(json.dumps(state, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    _write_hf(Path(sys.argv[1]), Path(sys.argv[2]))
