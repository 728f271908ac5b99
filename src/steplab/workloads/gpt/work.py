"""Parameters and FLOPs of a GPT by formula. No torch."""

from __future__ import annotations

from steplab.hardware.decoder import Decoder, decoder_work
from steplab.record import Work
from steplab.spec import Mode
from steplab.workloads.gpt.config import GPTConfig


def matmul_parameters(config: GPTConfig) -> int:
    """Weights that enter matrix products: projections, feed-forward, head; no embedding."""
    block = 4 * config.width**2 + 3 * config.width * config.ff_width
    return config.layers * block + config.vocab_size * config.width


def parameters(config: GPTConfig) -> int:
    """All parameters: matmul weights, the embedding and the norms."""
    norms = (2 * config.layers + 1) * config.width
    return matmul_parameters(config) + config.vocab_size * config.width + norms


def work(config: GPTConfig, batch: int, mode: Mode, attention: str) -> Work:
    """FLOPs of one micro-batch of `batch` sequences of `config.context` tokens."""
    shape = (config.context, config.layers, config.heads, config.head_width)
    return decoder_work(Decoder(*shape, matmul_parameters(config)), batch, mode, attention)
