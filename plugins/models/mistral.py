"""The Mistral family: Llama's decoder whose layers may read a sliding window only.

It does not know other families, files or how a decoder is computed.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from antiphon.plugins.models.contract import Model, Shape, number, plain_shape
from antiphon.runtime.plugin import Options


class Mistral(Model[Options]):
    """Mistral 7B and its kin. GGUF files of them call themselves "llama" and keep no window."""

    architectures: ClassVar[frozenset[str]] = frozenset({"MistralForCausalLM"})

    def shape(self, config: Mapping[str, Any]) -> Shape:
        """Read the config; a window as long as the context is none. Without the key HF's default holds: 4096."""
        window = config.get("sliding_window", 4096) or 0
        if window >= number(config, "max_position_embeddings"):
            window = 0
        return plain_shape(config, windows=(window,) * number(config, "num_hidden_layers"))
