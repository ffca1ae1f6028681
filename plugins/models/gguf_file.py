"""GGUF files: header, quantized tensors and names, brought to the HF form.

It does not know what a family makes of config and tensors.
"""

import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

from antiphon.plugins.models.checkpoint import SAMPLED_BYTES, Checkpoint, CheckpointError, Entry
from antiphon.plugins.models.gguf_blocks import BLOCKS, decode

# Bytes of float32 made at a time while a tensor is converted: small beside a model, large beside a call.
CHUNK = 1 << 24
# Architectures whose query and key rows llama.cpp stores interleaved: (pair, half) instead of HF's (half, pair).
INTERLEAVED = frozenset({"llama"})
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FACTORS = "rope_freqs.weight"
# GGUF key below the architecture's name -> key of the normal form; these are required.
REQUIRED = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}


class GgufCheckpoint(Checkpoint):
    """One GGUF file, mapped; tensors are decoded as they are read, by HF names and in HF row order."""

    def __init__(self, path: Path):
        """Read the header. Raises CheckpointError: no GGUF file, damaged, or of a type that is not read."""
        self.path = path
        try:
            self._reader = _Header(path, "c")  # 'c': private pages, so that torch may view them; nothing writes
        except (ValueError, IndexError, KeyError, OSError, OverflowError, struct.error) as cause:
            raise CheckpointError(_damaged(path, cause)) from cause
        self.architecture = self._required("general.architecture")
        if (self._field("split.count") or 1) > 1:
            raise CheckpointError(
                f"{path} is one part of a split GGUF, which is not read. Merge the parts with llama-gguf-split --merge"
            )
        self.name = str(self._field("general.name") or path.stem)
        self._tensors = {_hf_name(t.name): t for t in self._reader.tensors if t.name != FACTORS}
        self.index = {name: self._entry(t) for name, t in self._tensors.items()}
        self.config = self._config()

    def read(self, name: str, out: torch.Tensor) -> None:
        """Decode a tensor into ``out`` a few rows at a time, query and key rows in HF's order."""
        entry = self.require(name, tuple(out.shape))
        stored = self._bytes(name)
        columns = entry.shape[-1] if len(entry.shape) > 1 else 1
        head = self._head_rows(name)
        rows = stored if columns > 1 else stored.view(-1, BLOCKS[entry.stored][0])
        target = out.view(rows.shape[0], columns)
        step = max(1, CHUNK // (4 * columns * head)) * head
        for first in range(0, rows.shape[0], step):
            numbers = decode(rows[first : first + step], entry.stored)
            if head > 1:
                pairs = numbers.view(-1, head // 2, 2, columns)
                numbers = pairs.transpose(1, 2).reshape(-1, columns)
            target[first : first + step] = numbers

    def sample(self, name: str) -> bytes:
        """Bytes from the middle of the stored tensor."""
        flat = self._bytes(name).view(-1)
        middle = max(0, flat.numel() // 2 - SAMPLED_BYTES // 2)
        return flat[middle : middle + SAMPLED_BYTES].numpy().tobytes()

    def _head_rows(self, name: str) -> int:
        """Rows of one head where rows are stored interleaved, else 1."""
        if self.architecture in INTERLEAVED and (".q_proj." in name or ".k_proj." in name):
            return int(self.config["head_dim"])
        return 1

    def _bytes(self, name: str) -> torch.Tensor:
        data: npt.NDArray[Any] = self._tensors[name].data
        rows = data.reshape(-1, data.shape[-1]) if data.size else data.reshape(0, 1)
        return torch.from_numpy(rows.view(np.uint8))

    def _entry(self, tensor: gguf.ReaderTensor) -> Entry:
        kind = tensor.tensor_type.name
        if kind not in BLOCKS:
            raise CheckpointError(
                f"{self.path}: tensor {tensor.name!r} is quantized as {kind}, which is not read here (supported: "
                f"{', '.join(BLOCKS)}). Take a file of one of these types"
            )
        return Entry(tuple(int(size) for size in reversed(tensor.shape.tolist())), kind)

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.architecture}
        for key, ours in REQUIRED.items():
            config[ours] = self._number(key)
        heads = config["num_attention_heads"]
        head_dim = self._number("attention.key_length", config["hidden_size"] // max(heads, 1))
        if self._number("attention.value_length", head_dim) != head_dim:
            raise CheckpointError(f"{self.path}: keys and values of unequal width are not supported")
        names = self.index
        ends = [self._field(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")]
        return {
            **config,
            "vocab_size": self.require("model.embed_tokens.weight").shape[0],
            "num_key_value_heads": self._number("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rms_norm_eps": self._field("attention.layer_norm_rms_epsilon", True) or 1e-5,
            "rope_parameters": self._rope(head_dim),
            "sliding_window": self._number("attention.sliding_window", 0) or None,
            "num_local_experts": self._number("expert_count", 0),
            "tie_word_embeddings": "lm_head.weight" not in names,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in names,
            "attention_out_bias": "model.layers.0.self_attn.o_proj.bias" in names,
            "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in names,
            "eos_token_id": sorted({int(end) for end in ends if end is not None}),
        }

    def _rope(self, head_dim: int) -> dict[str, Any]:
        kind = self._field("rope.scaling.type", True) or "default"
        rope: dict[str, Any] = {
            "rope_type": "default" if kind == "none" else kind,
            "rope_theta": self._field("rope.freq_base", True) or 10000.0,
        }
        for key, ours in (("factor", "factor"), ("original_context_length", "original_max_position_embeddings")):
            value = self._field(f"rope.scaling.{key}", True)
            if value is not None:
                rope[ours] = value
        if (factor := self._field("rope.scale_linear", True)) is not None:  # as files before 2023-10 spell it
            rope |= {"rope_type": "linear", "factor": factor}
        turned = self._number("rope.dimension_count", head_dim)
        if turned != head_dim:
            rope["partial_rotary_factor"] = turned / head_dim
        # Llama 3's scaling arrives as a tensor of divisors, one a frequency.
        factors = next((t.data for t in self._reader.tensors if t.name == FACTORS), None)
        if factors is not None:
            if rope["rope_type"] != "default":
                raise CheckpointError(
                    f"{self.path}: rope factors beside {rope['rope_type']!r} scaling are not supported"
                )
            rope |= {"rope_type": "factors", "factors": [float(f) for f in factors]}
        return rope

    def _field(self, key: str, below: bool = False) -> Any:
        """Metadata value or None; ``below``: the key stands below the architecture's name."""
        field = self._reader.fields.get(f"{self.architecture}.{key}" if below else key)
        return None if field is None else field.contents()

    def _required(self, key: str, below: bool = False) -> Any:
        found = self._field(key, below)
        if found is None:
            raise CheckpointError(f"{self.path} lacks the metadata {key!r}: it holds no language model")
        return found

    def _number(self, key: str, default: int | None = None) -> int:
        found = self._field(key, True)
        if found is None:
            found = self._required(key, True) if default is None else default
        if isinstance(found, list):
            raise CheckpointError(f"{self.path}: {key!r} differs from layer to layer, which is not supported")
        return int(found)


class _Header(gguf.GGUFReader):
    """The library's reader with two changes in its inner methods, harmless where a later version drops them.

    Lists (the tokenizer's) are stepped over: the library makes arrays of every item, 2.4 s for 49152 tokens, and no
    list is wanted here. And a read beyond the end says so, where the library returns less than was asked for.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == gguf.GGUFValueType.ARRAY:
            kind, count = struct.unpack("<IQ", self._get(orig_offs, np.uint8, 12).tobytes())
            if kind != gguf.GGUFValueType.ARRAY and self.byte_order == "I":
                end = orig_offs + 12
                if kind == gguf.GGUFValueType.STRING:
                    length, view = struct.Struct("<Q"), self.data.data
                    for _ in range(count):
                        end += 8 + length.unpack_from(view, end)[0]
                else:
                    end += count * np.dtype(self.gguf_scalar_to_np[gguf.GGUFValueType(kind)]).itemsize
                return end - orig_offs, [self.data[orig_offs:end]], [], [gguf.GGUFValueType.ARRAY]
        return super()._get_field_parts(orig_offs, raw_type)

    def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
        end = int(offset) + int(count) * np.dtype(dtype).itemsize
        if end > len(self.data):
            raise IndexError(f"its header points to byte {end}")
        return super()._get(int(offset), dtype, int(count), override_order)


def _damaged(path: Path, cause: object) -> str:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        return f"{path} is no GGUF file: it begins with {magic!r}. Name a .gguf file or an HF model directory"
    return f"{path} ({path.stat().st_size} bytes) is truncated or damaged: {cause}. Fetch it again"


def _hf_name(name: str) -> str:
    """HF name of a tensor; names without a counterpart stay as they are."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in NAMES:
        return name
    layer = f"model.layers.{match[1]}." if match[1] else ""
    return f"{layer}{NAMES[match[2]]}.{match[3]}"
