"""The ``model`` contract: what a family file states about its architecture.

It does not know files, backends or how a decoder is computed.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from antiphon.actors.model import KVGroup
from antiphon.plugins.models.checkpoint import CheckpointError
from antiphon.runtime.plugin import O, Plugin


class Rotary(msgspec.Struct, frozen=True):
    """Rotary positions: ``width`` of a head's numbers turn, by frequencies that ``scaling`` stretches.

    ``kind`` is the HF name of the scaling ("default", "linear", "llama3", ...), or "factors": divisors given one a
    frequency.
    """

    width: int
    theta: float = 10000.0
    kind: str = "default"
    scaling: Mapping[str, Any] = msgspec.field(default_factory=dict)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the common decoder needs to know of a model; sizes in numbers, ``windows`` in tokens."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    context: int
    rotary: Rotary
    norm_eps: float = 1e-6
    activation: str = "silu"
    windows: tuple[int, ...] = ()  # one a layer, 0 = the whole context; empty: all 0
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False  # the head is the embedding
    eos: tuple[int, ...] = ()

    def window(self, layer: int) -> int:
        """Tokens that a layer reads, itself included; 0 for all."""
        return self.windows[layer] if self.windows else 0

    def groups(self, dtype: str) -> tuple[KVGroup, ...]:
        """KV groups: the layers of equal window, named "full" or "window-W"."""
        counts: dict[int, int] = {}
        for layer in range(self.layers):
            counts[self.window(layer)] = counts.get(self.window(layer), 0) + 1
        return tuple(
            KVGroup(group_name(window), layers, self.kv_heads, self.head_dim, dtype, window)
            for window, layers in sorted(counts.items())
        )


def group_name(window: int) -> str:
    """Name of the KV group of layers that read ``window`` tokens."""
    return f"window-{window}" if window else "full"


class Model(Plugin[O]):
    """Contract of a ``model``: a family of architectures, stated as differences from the common decoder.

    ``architectures`` are the class names an HF config may give, ``gguf`` the values of ``general.architecture``.
    """

    kind: ClassVar[str] = "model"
    where: ClassVar[frozenset[str]] = frozenset({"device"})
    architectures: ClassVar[frozenset[str]] = frozenset()
    gguf: ClassVar[frozenset[str]] = frozenset()

    def shape(self, config: Mapping[str, Any]) -> Shape:
        """Read a config in the checkpoints' normal form. Raises CheckpointError for what the family cannot do."""
        return plain_shape(config)


def plain_shape(config: Mapping[str, Any], **differences: Any) -> Shape:
    """Shape of a pre-norm decoder with rotary attention and a gated MLP, as most configs spell it.

    ``differences`` replace fields. Raises CheckpointError: keys missing, or sizes that do not fit each other.
    """
    hidden, heads = number(config, "hidden_size"), number(config, "num_attention_heads")
    head_dim = number(config, "head_dim", hidden // heads)
    kv_heads = number(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(f"config: {heads} attention heads cannot share {kv_heads} key-value heads evenly")
    rope = dict(config["rope_parameters"])
    width = int(head_dim * rope.pop("partial_rotary_factor", 1.0))
    rotary = Rotary(width, float(rope.pop("rope_theta")), str(rope.pop("rope_type")), rope)
    bias = bool(config.get("attention_bias"))
    fields: dict[str, Any] = {
        "vocabulary": number(config, "vocab_size"),
        "hidden": hidden,
        "layers": number(config, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "mlp": number(config, "intermediate_size"),
        "context": number(config, "max_position_embeddings"),
        "rotary": rotary,
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "activation": str(config.get("hidden_act", "silu")),
        "qkv_bias": bias,
        "out_bias": bool(config.get("attention_out_bias", bias)),
        "mlp_bias": bool(config.get("mlp_bias")),
        "tied": bool(config.get("tie_word_embeddings")),
        "eos": tuple(config.get("eos_token_id") or ()),
    }
    return Shape(**{**fields, **differences})


def number(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Positive integer from a config. Raises CheckpointError: absent without default, or no positive integer."""
    found = config.get(key)
    if found is None:
        found = default
    if not isinstance(found, int) or found <= 0:
        raise CheckpointError(f"config: {key!r} is {found!r}, a positive number is needed: the config is no model's")
    return found
