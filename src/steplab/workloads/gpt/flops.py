"""Parameters and FLOPs of a GPT by formula. No torch."""

from __future__ import annotations

from dataclasses import replace

from steplab.core import Mode, Work
from steplab.costs.op_flops import Decoder, decoder_work
from steplab.workloads.gpt.config import GPTConfig

# Matmuls with the head that a loss runs beyond one forward and two backward. The chunked ones
# compute both gradients in the forward, needed or not; the lean one computes the logits twice.
MORE_PRODUCTS = {
    "forward": {"chunked": 2, "triton_chunked": 2},
    "forward+backward": {"triton_lean": 1},
    "full": {"triton_lean": 1},
}


def matmul_parameters(config: GPTConfig) -> int:
    """Weights that enter matrix products: projections, feed-forward, head; no embedding."""
    block = 4 * config.width**2 + 3 * config.width * config.ff_width
    return config.layers * block + config.vocab_size * config.width


def parameters(config: GPTConfig) -> int:
    """All parameters: matmul weights, the embedding and the norms."""
    norms = (2 * config.layers + 1) * config.width
    return matmul_parameters(config) + config.vocab_size * config.width + norms


def work(config: GPTConfig, batch: int, mode: Mode, attention: str, loss: str = "") -> Work:
    """FLOPs of one micro-batch of `batch` sequences of `config.context` tokens.

    `attention` and `loss` are the implementations that ran.
    """
    shape = (config.context, config.layers, config.heads, config.head_width)
    found = decoder_work(Decoder(*shape, matmul_parameters(config)), batch, mode, attention)
    products = MORE_PRODUCTS.get(mode, {}).get(loss, 0)
    if not products or found.hardware is None:
        return found
    more = products * 2.0 * found.tokens * config.vocab_size * config.width
    return replace(found, hardware=found.hardware + more)
