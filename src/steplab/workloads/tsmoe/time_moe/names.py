"""Which part of which of our parameters each tensor of a Time-MoE file is. No torch.

Ours are stacked: q, k and v in one matrix, gate and up of an expert in one, all experts of a layer
in one tensor, all heads in one matrix. One table serves both ways, so that loading and exporting
cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from steplab.workloads.tsmoe.config import TsmoeConfig


class Part(NamedTuple):
    """`parameter[at]`, which has this shape; () is the whole parameter."""

    parameter: str
    at: tuple[int | slice, ...]
    shape: tuple[int, ...]


def parts(config: TsmoeConfig) -> dict[str, Part]:
    """Return all tensors of a model of the layout time-moe, by their names in a Time-MoE file."""
    width = config.hidden_size
    found = {
        "model.embed_layer.emb_layer.weight": Part("embedding.value.weight", (), (width, 1)),
        "model.embed_layer.gate_layer.weight": Part("embedding.gate.weight", (), (width, 1)),
        "model.norm.weight": Part("norm.weight", (), (width,)),
    }
    for number in range(config.n_decoder_layers):
        theirs, ours = f"model.layers.{number}", f"blocks.{number}"
        for name, part in (*_attention(width), *_mixture(config)):
            found[f"{theirs}.{name}"] = part._replace(parameter=f"{ours}.{part.parameter}")
    first = 0
    for number, points in enumerate(config.horizon_lengths):
        rows = (slice(first, first + points),)
        found[f"lm_heads.{number}.out_layer.weight"] = Part("heads.weight", rows, (points, width))
        first += points
    return found


def _attention(width: int) -> Iterator[tuple[str, Part]]:
    yield "input_layernorm.weight", Part("attention_norm.weight", (), (width,))
    for number, letter in enumerate("qkv"):
        rows = (slice(number * width, (number + 1) * width),)
        theirs, ours = f"self_attn.{letter}_proj", "attention.qkv"
        yield f"{theirs}.weight", Part(f"{ours}.weight", rows, (width, width))
        yield f"{theirs}.bias", Part(f"{ours}.bias", rows, (width,))
    yield "self_attn.o_proj.weight", Part("attention.out.weight", (), (width, width))
    yield "post_attention_layernorm.weight", Part("norms.0.weight", (), (width,))


def _mixture(config: TsmoeConfig) -> Iterator[tuple[str, Part]]:
    width, ours = config.hidden_size, "mixtures.0"
    router = Part(f"{ours}.router.weight", (), (config.num_experts, width))
    yield "ffn_layer.gate.weight", router
    for number in range(config.num_experts):
        stacked = (f"{ours}.experts.w_in_EFD", f"{ours}.experts.w_out_EDF")
        for name, part in _expert(*stacked, (number,), width, config.d_expert):
            yield f"ffn_layer.experts.{number}.{name}", part
    shared = (f"{ours}.shared.w_in.weight", f"{ours}.shared.w_out.weight")
    for name, part in _expert(*shared, (), width, config.d_ff):
        yield f"ffn_layer.shared_expert.{name}", part
    gate = Part(f"{ours}.shared_gate.weight", (), (1, width))
    yield "ffn_layer.shared_expert_gate.weight", gate


def _expert(
    w_in: str, w_out: str, which: tuple[int, ...], width: int, inner: int
) -> Iterator[tuple[str, Part]]:
    yield "gate_proj.weight", Part(w_in, (*which, slice(0, inner)), (inner, width))
    yield "up_proj.weight", Part(w_in, (*which, slice(inner, 2 * inner)), (inner, width))
    yield "down_proj.weight", Part(w_out, which, (width, inner))
