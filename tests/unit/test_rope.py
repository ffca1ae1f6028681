"""Rotary embedding and RMS norm against transformers."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from antiphon.kernels import norms, rope

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALINGS = [None, {"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}, LLAMA3, LLAMA3 | {"factor": 32.0}]


def config(theta, scaling, width=64):
    parameters = {"rope_theta": theta, "rope_type": "default"} | (scaling or {})
    return LlamaConfig(
        hidden_size=4 * width,
        num_attention_heads=4,
        head_dim=width,
        rope_parameters=parameters,
        max_position_embeddings=8192,
    )


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_frequencies_and_tables_are_those_of_transformers(scaling, theta):
    made = config(theta, scaling)
    kind = made.rope_parameters["rope_type"]
    if kind == "default":
        expected = LlamaRotaryEmbedding(made).inv_freq
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[kind](made, torch.device("cpu"))
        assert factor == 1.0
    inverse = rope.frequencies(64, theta, scaling)
    assert inverse.dtype == torch.float32
    torch.testing.assert_close(inverse, expected, rtol=1e-7, atol=0)

    positions = torch.tensor([0, 1, 77, 5000, 8191], dtype=torch.int32)
    cosines, sines = LlamaRotaryEmbedding(made)(torch.zeros(1), positions[None].long())
    ours = rope.tables(positions, inverse)
    torch.testing.assert_close(ours[0], cosines[0, :, :32], rtol=0, atol=1e-6)
    torch.testing.assert_close(ours[1], sines[0, :, 32:], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 0.05)])
def test_rotation_is_that_of_transformers(dtype, tolerance):
    torch.manual_seed(0)
    q = torch.randn(6, 4, 64).to(dtype)
    positions = torch.tensor([3, 4, 5, 0, 1, 900])
    rotary = LlamaRotaryEmbedding(config(10_000.0, None))
    cosines, sines = rotary(q, positions[None])
    expected, _ = apply_rotary_pos_emb(q.transpose(0, 1)[None], q.transpose(0, 1)[None], cosines, sines)
    got = rope.rotate(q, *rope.tables(positions, rope.frequencies(64, 10_000.0)))
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected[0].transpose(0, 1), rtol=0, atol=tolerance)


def test_elements_beyond_the_rotary_width_stay():
    x = torch.randn(3, 2, 10)
    got = rope.rotate(x, *rope.tables(torch.tensor([1, 2, 3]), rope.frequencies(4, 10_000.0)))
    assert torch.equal(got[..., 4:], x[..., 4:])
    assert not torch.equal(got[..., :4], x[..., :4])
    torch.testing.assert_close(got.norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "yarn", "factor": 2.0}, "'yarn' is not one of"),
        ({"type": "linear"}, "needs factor"),
        ({"rope_type": "linear", "factor": 0}, "needs factor"),
        ({key: LLAMA3[key] for key in LLAMA3 if key != "low_freq_factor"}, "needs low_freq_factor"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor above"),
    ],
)
def test_wrong_scalings_are_refused(scaling, message):
    with pytest.raises(ValueError, match=message):
        rope.frequencies(64, 10_000.0, scaling)


def test_an_odd_width_is_refused():
    with pytest.raises(ValueError, match="even"):
        rope.frequencies(5, 10_000.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_that_of_transformers(dtype):
    torch.manual_seed(1)
    layer = LlamaRMSNorm(96, eps=1e-5).to(dtype)
    layer.weight.data = torch.randn(96).to(dtype)
    x = (torch.randn(5, 7, 96) * 3).to(dtype)
    got = norms.rms_norm(x, layer.weight.data, 1e-5)
    assert got.dtype == dtype
    torch.testing.assert_close(got, layer(x), rtol=1e-6, atol=1e-6)
