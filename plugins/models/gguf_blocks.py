"""Block formats of GGUF: which are read, and how their bytes become numbers.

It does not know files, names or models.
"""

import torch

# Bytes of one block, and the numbers in it. Layouts: llama.cpp, ggml/src/ggml-common.h.
BLOCKS = {"F32": (4, 1), "F16": (2, 1), "BF16": (2, 1), "Q4_0": (18, 32), "Q4_1": (20, 32), "Q8_0": (34, 32)}
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def decode(stored: torch.Tensor, kind: str) -> torch.Tensor:
    """Numbers of packed rows: uint8 [rows, bytes] -> float [rows, columns], float32 unless ``kind`` is a plain type.

    Values equal ``gguf.dequantize`` bit for bit; done here because that takes three times as long, which every
    start and every restart after a crash would pay.
    """
    rows = stored.shape[0]
    if kind in PLAIN:
        return stored.view(PLAIN[kind])
    block = stored.reshape(-1, BLOCKS[kind][0])  # one block a row: scale, (minimum,) 32 quants
    scale = _half(block, 0)
    if kind == "Q8_0":
        return block[:, 2:].view(torch.int8).to(torch.float32).mul_(scale).view(rows, -1)
    quants = block[:, -16:]
    out = torch.empty(block.shape[0], 2, 16)  # low nibbles are numbers 0..15, high ones 16..31
    out[:, 0] = quants & 15
    out[:, 1] = quants >> 4
    numbers = out.view(-1, 32)
    if kind == "Q4_0":
        return numbers.sub_(8).mul_(scale).view(rows, -1)
    return numbers.mul_(scale).add_(_half(block, 2)).view(rows, -1)


def _half(block: torch.Tensor, at: int) -> torch.Tensor:
    return block[:, at : at + 2].contiguous().view(torch.float16).to(torch.float32)  # [blocks, 1]
