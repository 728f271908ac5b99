"""Parameters and FLOPs of a GPT by formula. No torch."""

from __future__ import annotations

from steplab.hardware import op_costs
from steplab.record import Work
from steplab.spec import Mode
from steplab.workloads.gpt.config import GPTConfig

# Implementations that hold the score matrix compute all pairs and need no recomputation.
DENSE_ATTENTION = ("reference", "math")
PASSES = {"infer": 1, "forward": 1, "forward+backward": 3, "full": 3}


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
    tokens = batch * config.context
    dense = 2.0 * matmul_parameters(config) * tokens * PASSES[mode]

    def attend(causal: bool, backward_recomputes: bool) -> float:
        pairs = op_costs.attention_pairs(config.context, config.context, causal)
        shape = (pairs, config.heads, config.head_width, config.head_width)
        total = op_costs.attention_forward(*shape)
        if PASSES[mode] == 3:
            total += op_costs.attention_backward(*shape, backward_recomputes)
        return total * batch * config.layers

    executes_all = attention in DENSE_ATTENTION
    return Work(
        tokens=tokens,
        model=dense + attend(True, False),
        palm=dense + attend(False, False),
        hardware=dense + attend(not executes_all, not executes_all),
        formula=f"{2 * PASSES[mode]} x {matmul_parameters(config):,} matmul parameters per token "
        "+ attention over visible pairs",
    )
