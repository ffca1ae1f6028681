"""What actors know of a model: the ``[model]`` table of a deployment and the facts a backend tells.

It does not know weights, tensors or files' formats.
"""

from typing import Literal

import msgspec

from antiphon.runtime.plugin import Options

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class ModelSection(Options, frozen=True):
    """``[model]``: ``path`` is a catalogue name, an HF directory or a ``.gguf`` file."""

    path: str = "smollm2-135m-instruct"
    dtype: Dtype = "auto"


class KVGroup(msgspec.Struct, frozen=True):
    """A set of layers whose KV lies in one pool.

    ``window`` 0 keeps the whole context; otherwise only the last ``window`` tokens are read. ``owner`` is
    "target" or "drafter": a drafter's group is auxiliary. ``dtype`` is that of the stored numbers; ``quantization``
    names how they are stored if not plainly, and ``scale_bytes`` is what it keeps beside the ``width`` numbers of a
    head. A block leaves the device as one flat record a group: [layer][K, V][token][head][width and scales].
    """

    name: str
    layers: int
    heads: int
    width: int
    dtype: str
    window: int = 0
    owner: Literal["target", "drafter"] = "target"
    quantization: str = ""
    scale_bytes: int = 0

    def slot_bytes(self) -> int:
        """Bytes one token takes in this group, keys and values together."""
        size = {"float32": 4, "int64": 8, "bfloat16": 2, "float16": 2, "int8": 1}[self.dtype]
        return 2 * self.layers * self.heads * (self.width * size + self.scale_bytes)


class Facts(msgspec.Struct, frozen=True):
    """What a backend says of its model; known from the header, before any weight is read."""

    name: str
    vocabulary: int
    context: int  # longest sequence in tokens
    layers: int
    hidden: int
    groups: tuple[KVGroup, ...]
    eos: tuple[int, ...] = ()
    dtype: str = "float32"
    digest: str = ""  # of config, tensor index, sizes and sampled bytes
