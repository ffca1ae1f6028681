"""The Llama family: Llama 2 and 3, SmolLM2 and whatever else calls itself LlamaForCausalLM.

It does not know other families, files or how a decoder is computed.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from antiphon.plugins.models.checkpoint import CheckpointError
from antiphon.plugins.models.contract import Model, Shape, plain_shape
from antiphon.runtime.plugin import Options


class Llama(Model[Options]):
    """The common decoder as it is; a GGUF of this name may also hide a mixture of experts, which is refused."""

    architectures: ClassVar[frozenset[str]] = frozenset({"LlamaForCausalLM"})
    gguf: ClassVar[frozenset[str]] = frozenset({"llama"})

    def shape(self, config: Mapping[str, Any]) -> Shape:
        """Read the config; without ``tie_word_embeddings`` the head is a tensor of its own."""
        if config.get("num_local_experts"):
            raise CheckpointError(f"a mixture of {config['num_local_experts']} experts is not supported by 'llama'")
        return plain_shape(config)
