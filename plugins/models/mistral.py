"""The Mistral family: Llama's decoder of which all layers, or some, read a sliding window only.

It does not know other families, files or how a decoder is computed.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from antiphon.plugins.models.checkpoint import CheckpointError
from antiphon.plugins.models.contract import Model, Shape, number, plain_shape
from antiphon.runtime.plugin import Options


class Mistral(Model[Options]):
    """Mistral 7B, Ministral and their kin. GGUF files of them call themselves "llama" and keep no window."""

    architectures: ClassVar[frozenset[str]] = frozenset({"MistralForCausalLM", "MinistralForCausalLM"})

    def shape(self, config: Mapping[str, Any]) -> Shape:
        """Read the config; a window as long as the context is none. Without the key HF's default holds: 4096.

        ``layer_types`` says which layers have it; without, all do. Raises CheckpointError for types not known.
        """
        window = config.get("sliding_window", 4096) or 0
        if window >= number(config, "max_position_embeddings"):
            window = 0
        layers = number(config, "num_hidden_layers")
        types = config.get("layer_types") or ["sliding_attention"] * layers
        if len(types) != layers or not set(types) <= {"sliding_attention", "full_attention"}:
            raise CheckpointError(f"config: layer_types {types!r} are not 'sliding_attention' or 'full_attention' for "
                                  f"each of {layers} layers")
        return plain_shape(config, windows=tuple(window if t == "sliding_attention" else 0 for t in types))
