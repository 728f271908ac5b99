"""FLOPs of a causal decoder, whatever its feed-forward is made of."""

from __future__ import annotations

from dataclasses import dataclass

from steplab.core import Mode, Work
from steplab.costs import op_flops

# A backward costs two products for each of the forward's.
PASSES = {"infer": 1, "forward": 1, "forward+backward": 3, "full": 3}
# Implementations that hold the score matrix compute all pairs and need no recomputation.
DENSE_ATTENTION = ("reference", "math")


@dataclass(frozen=True)
class Decoder:
    """What the FLOPs of a causal decoder depend on."""

    tokens: int  # per sequence
    layers: int
    heads: int
    head_width: int
    matmul_parameters: int  # active ones


def decoder_work(decoder: Decoder, batch: int, mode: Mode, attention: str) -> Work:
    """Return the FLOPs of one micro-batch; `attention` is the implementation that ran."""
    passes = PASSES[mode]
    tokens = batch * decoder.tokens
    dense = 2.0 * decoder.matmul_parameters * tokens * passes

    def attend(causal: bool, recomputes: bool) -> float:
        pairs = op_flops.attention_pairs(decoder.tokens, decoder.tokens, causal)
        shape = (pairs, decoder.heads, decoder.head_width, decoder.head_width)
        total = op_flops.attention_forward(*shape)
        if passes == 3:
            total += op_flops.attention_backward(*shape, recomputes)
        return total * batch * decoder.layers

    all_pairs = attention in DENSE_ATTENTION
    return Work(
        tokens=tokens,
        model=dense + attend(True, False),
        palm=dense + attend(False, False),
        hardware=dense + attend(not all_pairs, not all_pairs),
        formula=f"{2 * passes} x {decoder.matmul_parameters:,} active matmul parameters per token "
        "+ attention over visible pairs",
    )
