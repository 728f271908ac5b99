"""Parameters and FLOPs of the mixture by formula. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from steplab.core import Mode, Work
from steplab.costs.op_flops import Decoder, decoder_work
from steplab.workloads.tsmoe.config import TsmoeConfig


def expert_parameters(config: TsmoeConfig, inner: int) -> int:
    """Weights of one expert of that inner width: two matrices, three for SwiGLU."""
    matrices = 3 if config.activation == "swiglu" else 2
    return matrices * config.hidden_size * inner


def parameters(config: TsmoeConfig) -> tuple[int, int]:
    """Return (all parameters, those active for one token: k of the routed experts)."""
    width = config.hidden_size
    idle = config.num_experts - config.k
    routed = expert_parameters(config, config.d_expert)
    mixture = config.num_experts * routed + expert_parameters(config, config.d_ff)
    mixture += width * config.num_experts + width + width  # router, shared gate, norm
    attention = width * 3 * width + 3 * width + width * width + width  # qkv, bias, out, norm
    block = attention + config.num_expert_layers * mixture
    bias_or_norm = config.outputs if config.layout == "gelu" else width
    heads = config.outputs * width + bias_or_norm
    total = config.n_decoder_layers * block + 2 * width * config.patch_length + heads
    return total, total - config.n_decoder_layers * config.num_expert_layers * idle * routed


def matmul_parameters(config: TsmoeConfig) -> int:
    """Active weights that enter matrix products: no norms, no biases."""
    width = config.hidden_size
    vectors = config.n_decoder_layers * (3 * width + width + config.num_expert_layers * width)
    vectors += config.outputs if config.layout == "gelu" else width
    return parameters(config)[1] - vectors


def work(config: TsmoeConfig, batch: int, mode: Mode, ran: Mapping[str, str]) -> Work:
    """FLOPs of one micro-batch of `batch` windows."""
    shape = (config.tokens, config.n_decoder_layers, config.n_head, config.head_width)
    decoder = Decoder(*shape, matmul_parameters(config))
    found = decoder_work(decoder, batch, mode, ran.get("attention", ""))
    if ran.get("experts") == "capacity":
        # Its padded rows are executed too; how many depends on its rounding.
        return replace(found, hardware=None)
    return found
