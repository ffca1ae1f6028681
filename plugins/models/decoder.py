"""The common decoder: pre-norm transformer with rotary attention and gated MLP, over paged KV.

It does not know families, files, batches' origin or how attention is computed: a shape, a checkpoint and prepared
reaches are handed in.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from antiphon.kernels import rope
from antiphon.kernels.attention import Decode
from antiphon.kernels.norms import rms_norm
from antiphon.plugins.models.checkpoint import Checkpoint, CheckpointError
from antiphon.plugins.models.contract import Shape
from antiphon.plugins.models.linear import Linear, fused
from antiphon.plugins.quantizations.contract import Codec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}
# Tensors that some checkpoints carry though they follow from the config.
DERIVED = re.compile(r".*rotary_emb\.inv_freq")


class Layer(NamedTuple):
    """Weights of one layer: ``qkv`` gives query, key and value heads in this order, ``gate_up`` gate then up."""

    attention_norm: Tensor
    qkv: Linear
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Place(NamedTuple):
    """Where a layer keeps keys and values: its group's name and its pool [2, blocks, block size, kv heads, width]."""

    group: str
    kv: Tensor
    codec: Codec | None = None  # None: plainly, in the compute dtype


Read: TypeAlias = Callable[[Tensor, Tensor, Decode | None], Tensor]
"""q [N, heads, width], a layer's pool and how its slots are decoded -> [N, heads, width]."""


class Reach(NamedTuple):
    """How a step's rows reach one KV group: the slots they write, and attention prepared for what they read."""

    slots: Tensor  # int64 [N] into blocks * block size
    attend: Read


class Step(NamedTuple):
    """One step's rows as the decoder reads them."""

    ids: Tensor  # int [N]
    positions: Tensor  # int [N]
    logit_rows: Tensor  # int64 [L]
    reaches: Mapping[str, Reach]  # by group
    capture: tuple[str, ...] = ()


class Decoder:
    """Weights of one model in one dtype, and the computation of a step."""

    def __init__(self, shape: Shape, checkpoint: Checkpoint, dtype: torch.dtype, *, pack: bool = False):
        """Read the weights. Raises CheckpointError: tensors missing, misshapen or left over, unknown variants.

        With ``pack`` matrices lie in the processor's own layout; a tied head is then kept beside the embedding.
        """
        if shape.activation not in ACTIVATIONS:
            raise CheckpointError(
                f"config: activation {shape.activation!r} is not known; known are {', '.join(sorted(ACTIVATIONS))}"
            )
        self.shape = shape
        self.dtype = dtype
        self._activate = ACTIVATIONS[shape.activation]
        self._inverse = _frequencies(shape)
        reader = _Reader(checkpoint, dtype, pack)
        self.embedding = reader.tensor("model.embed_tokens.weight", shape.vocabulary, shape.hidden)
        self.layers = [_layer(reader, shape, f"model.layers.{layer}") for layer in range(shape.layers)]
        self.norm = reader.tensor("model.norm.weight", shape.hidden)
        if shape.tied:
            reader.used.add("lm_head.weight")
            self.head = Linear(self.embedding, None, pack)
        else:
            self.head = reader.linear([("lm_head", shape.vocabulary)], shape.hidden)
        reader.check_all_used()

    def run(self, step: Step, places: Sequence[Place]) -> tuple[Tensor, dict[str, Tensor]]:
        """Write the rows' keys and values, return float32 logits [L, vocabulary] and captured states [N, hidden].

        "input:i" is what enters layer i, "output:i" what leaves it, before the next norm. Raises ValueError for a
        name that no layer has.
        """
        shape = self.shape
        hidden = dict.fromkeys(step.capture)
        if unknown := [name for name in hidden if not self._has(name)]:
            raise ValueError(
                f"no layer has the hidden state {unknown[0]!r}: 'input:i' or 'output:i', i < {shape.layers}"
            )
        captured: dict[str, Tensor] = {}
        angles = rope.tables(step.positions, self._inverse)
        x = functional.embedding(step.ids, self.embedding)
        for i, (layer, place) in enumerate(zip(self.layers, places, strict=True)):
            if f"input:{i}" in hidden:
                captured[f"input:{i}"] = x
            attended = self._attend(layer, x, step.reaches[place.group], place, angles)
            if i == shape.layers - 1 and f"output:{i}" not in hidden:
                # Nobody reads other rows any more.
                attended, x = attended[step.logit_rows], x[step.logit_rows]
            x = x + layer.out(attended)
            x = x + self._mlp(layer, x)
            if f"output:{i}" in hidden:
                captured[f"output:{i}"] = x
        if f"output:{shape.layers - 1}" in hidden:
            x = x[step.logit_rows]
        return self.logits(x), captured

    def logits(self, x: Tensor) -> Tensor:
        """Final norm and head: [L, hidden] as a last layer leaves it -> float32 [L, vocabulary]."""
        if not len(x):
            return torch.empty(0, self.shape.vocabulary)
        return self.head(rms_norm(x, self.norm, self.shape.norm_eps)).float()

    def _attend(self, layer: Layer, x: Tensor, reach: Reach, place: Place, angles: tuple[Tensor, Tensor]) -> Tensor:
        shape = self.shape
        qkv = layer.qkv(rms_norm(x, layer.attention_norm, shape.norm_eps))
        heads = qkv.view(len(x), shape.heads + 2 * shape.kv_heads, shape.head_dim)
        turned = rope.rotate(heads[:, : shape.heads + shape.kv_heads], *angles)
        keys, values, decode = turned[:, shape.heads :], heads[:, shape.heads + shape.kv_heads :], None
        if place.codec is not None:
            keys, values, decode = place.codec.encode(keys, 0), place.codec.encode(values, 1), place.codec.decode
        slots = place.kv.flatten(1, 2)  # [2, slots, kv heads, width], a view
        slots[0].index_copy_(0, reach.slots, keys)
        slots[1].index_copy_(0, reach.slots, values)
        return reach.attend(turned[:, : shape.heads], place.kv, decode).view(len(x), -1)

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        gate_up = layer.gate_up(rms_norm(x, layer.mlp_norm, self.shape.norm_eps))
        gate, up = gate_up[:, : self.shape.mlp], gate_up[:, self.shape.mlp :]
        return layer.down(self._activate(gate).mul_(up))

    def _has(self, name: str) -> bool:
        side, _, layer = name.partition(":")
        return side in {"input", "output"} and layer.isdecimal() and int(layer) < self.shape.layers


class _Reader:
    """Reads tensors of one checkpoint in one dtype and remembers which."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, pack: bool):
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.pack = pack
        self.used: set[str] = set()

    def tensor(self, name: str, *shape: int) -> Tensor:
        self.used.add(name)
        return self.checkpoint.tensor(name, self.dtype, shape)

    def linear(self, parts: Sequence[tuple[str, int]], columns: int, bias: bool = False) -> Linear:
        for name, _ in parts:
            self.used |= {f"{name}.weight", f"{name}.bias"} if bias else {f"{name}.weight"}
        return fused(self.checkpoint, parts, columns, self.dtype, bias=bias, pack=self.pack)

    def check_all_used(self) -> None:
        left = [name for name in self.checkpoint.index if name not in self.used and not DERIVED.fullmatch(name)]
        if left:
            raise CheckpointError(
                f"{self.checkpoint.path}: the architecture has no use for {len(left)} tensors ({', '.join(left[:3])}): "
                "config and weights are not of the same model, or a feature is not supported"
            )


def _layer(reader: _Reader, shape: Shape, name: str) -> Layer:
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    qkv = [(f"{attention}.q_proj", wide), (f"{attention}.k_proj", narrow), (f"{attention}.v_proj", narrow)]
    gate_up = [(f"{mlp}.gate_proj", shape.mlp), (f"{mlp}.up_proj", shape.mlp)]
    return Layer(
        reader.tensor(f"{name}.input_layernorm.weight", shape.hidden),
        reader.linear(qkv, shape.hidden, shape.qkv_bias),
        reader.linear([(f"{attention}.o_proj", shape.hidden)], wide, shape.out_bias),
        reader.tensor(f"{name}.post_attention_layernorm.weight", shape.hidden),
        reader.linear(gate_up, shape.hidden, shape.mlp_bias),
        reader.linear([(f"{mlp}.down_proj", shape.hidden)], shape.mlp, shape.mlp_bias),
    )


def key_magnitudes(shape: Shape, checkpoint: Checkpoint, layer: int) -> Tensor:
    """How large a layer's keys are expected to be by channel, float32 [kv heads, head dim], from the weights alone.

    The root mean square for inputs that the norm leaves white. The two channels of a rotary pair turn into each other,
    so they share theirs.
    """
    name = f"model.layers.{layer}"
    rows = shape.kv_heads * shape.head_dim
    weight = checkpoint.tensor(f"{name}.self_attn.k_proj.weight", torch.float32, (rows, shape.hidden))
    norm = checkpoint.tensor(f"{name}.input_layernorm.weight", torch.float32, (shape.hidden,))
    squares = (weight * norm).square_().sum(dim=1)
    if shape.qkv_bias:
        squares += checkpoint.tensor(f"{name}.self_attn.k_proj.bias", torch.float32, (rows,)).square_()
    found = squares.view(shape.kv_heads, shape.head_dim)
    half = shape.rotary.width // 2
    found[:, :half] = (found[:, :half] + found[:, half : 2 * half]) / 2
    found[:, half : 2 * half] = found[:, :half]
    return found.sqrt_()


def _frequencies(shape: Shape) -> Tensor:
    """Angle per position of each pair of a head's numbers, float32 [rotary width / 2]."""
    rotary = shape.rotary
    if rotary.kind == "factors":
        factors = torch.tensor(rotary.scaling["factors"], dtype=torch.float32)
        if len(factors) != rotary.width // 2:
            raise CheckpointError(f"{len(factors)} rope factors do not fit a head's {rotary.width // 2} pairs")
        return rope.frequencies(rotary.width, rotary.theta) / factors
    given = {"original_max_position_embeddings": shape.context, **rotary.scaling, "rope_type": rotary.kind}
    try:
        return rope.frequencies(rotary.width, rotary.theta, given)
    except ValueError as cause:
        raise CheckpointError(f"config: {cause}") from cause
