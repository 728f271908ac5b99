"""Parameters and FLOPs of Megalodon by formula. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from steplab.core import Mode, Work
from steplab.costs import op_flops
from steplab.costs.op_flops import DENSE_ATTENTION, PASSES
from steplab.workloads.megalodon.config import MegalodonConfig

# Multiply-adds per channel, mode and token: one complex step and its read-out; then the reversed
# one with the sums for the gradients.
EMA_FORWARD, EMA_BACKWARD = 6, 14


def matmul_parameters(config: MegalodonConfig) -> int:
    """Weights that enter matrix products: projections, feed-forward, head; no embedding."""
    D, E = config.width, config.value_width
    projections = D * config.shared_width + 2 * D * E + D * D + E * D
    feed_forward = (3 if config.swiglu else 2) * D * config.ff_width
    return config.layers * (projections + feed_forward) + config.vocab_size * D


def parameters(config: MegalodonConfig) -> int:
    """All parameters."""
    D, E, Z = config.width, config.value_width, config.shared_width
    biases = Z + 2 * E + D
    norms = 2 * D + D + 4 * Z + 2 * D
    averages = 4 * D * config.modes + 2 * D
    rescale = D if config.rescale_ff else 0
    total = config.layers * (biases + norms + averages + rescale) + 2 * D
    embedding = 0 if config.tied else config.vocab_size * D
    return matmul_parameters(config) + embedding + total


def work(config: MegalodonConfig, batch: int, mode: Mode, ran: Mapping[str, str]) -> Work:
    """FLOPs of one micro-batch of `batch` sequences of `config.context` tokens."""
    passes, tokens = PASSES[mode], batch * config.context
    dense = 2.0 * matmul_parameters(config) * tokens * passes
    whole, rest = divmod(config.context, config.chunk)

    def pairs(causal: bool) -> float:
        each, last = (op_flops.attention_pairs(n, n, causal) for n in (config.chunk, rest))
        return whole * each + last

    def attend(pairs: float, recomputes: bool) -> float:
        shape = (pairs, config.heads, config.head_width, config.value_head_width)
        total = op_flops.attention_forward(*shape)
        if passes == 3:
            total += op_flops.attention_backward(*shape, recomputes)
        return total * batch * config.layers

    by = ran.get("attention", "")
    computed = pairs(by not in DENSE_ATTENTION)
    if by == "blocks":
        each, last = (op_flops.attention_block_pairs(n, n) for n in (config.chunk, rest))
        computed = whole * each + last
    recomputes = by not in (*DENSE_ATTENTION, "blocks")
    ema = EMA_FORWARD + (EMA_BACKWARD if passes == 3 else 0)
    return Work(
        tokens=tokens,
        model=dense + attend(pairs(True), False),
        palm=dense + attend(pairs(False), False),
        hardware=dense + attend(computed, recomputes),
        vector=2.0 * ema * tokens * config.width * config.modes * config.layers,
        formula=f"{2 * passes} x {matmul_parameters(config):,} matmul parameters per token "
        "+ attention over visible pairs of each chunk",
    )
