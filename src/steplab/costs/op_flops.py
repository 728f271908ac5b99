"""FLOPs of the ops that dominate a step, and of a whole decoder, from shapes alone.

A multiply-add counts as two operations. `visible` pairs are the (query, key) pairs that the mask
leaves; the PaLM convention counts all pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from steplab.core import Mode, Work


def matmul(m: int, n: int, k: int) -> float:
    """FLOPs of an (m, k) by (k, n) product."""
    return 2.0 * m * n * k


def attention_pairs(queries: int, keys: int, causal: bool) -> float:
    """Number of (query, key) pairs that are visible; causal is aligned to the last key."""
    if not causal:
        return float(queries * keys)
    offset = keys - queries
    if offset < 0:
        # The first -offset queries see nothing; the rest see 1, 2, ... keys.
        return keys * (keys + 1) / 2
    return queries * offset + queries * (queries + 1) / 2


ATTENTION_BLOCK = 512  # queries that attention by blocks takes at once


def attention_block_pairs(queries: int, keys: int) -> float:
    """Number of pairs that causal attention by blocks computes: all keys up to a block's last."""
    starts = range(0, queries, ATTENTION_BLOCK)
    stops = [min(start + ATTENTION_BLOCK, queries) for start in starts]
    blocks = zip(starts, stops, strict=True)
    return float(sum((stop - start) * (keys - queries + stop) for start, stop in blocks))


def attention_forward(pairs: float, heads: int, d_qk: int, d_v: int) -> float:
    """FLOPs of scores and weighted values for `pairs` per head: two matrix products."""
    return 2.0 * pairs * heads * (d_qk + d_v)


def attention_backward(pairs: float, heads: int, d_qk: int, d_v: int, recompute: bool) -> float:
    """FLOPs of the four gradient products; flash kernels recompute the scores, a fifth product."""
    gradients = 2.0 * attention_forward(pairs, heads, d_qk, d_v)
    return gradients + (2.0 * pairs * heads * d_qk if recompute else 0.0)


def fft(length: int, batch: int, real: bool) -> float:
    """FLOPs of `batch` transforms by the usual 5 n log2 n convention, half of it for real input."""
    full = 5.0 * length * math.log2(max(length, 2)) * batch
    return full / 2 if real else full


def scan(elements: int) -> float:
    """FLOPs of a cumulative sum or product: one operation per element."""
    return float(elements)


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
        pairs = attention_pairs(decoder.tokens, decoder.tokens, causal)
        shape = (pairs, decoder.heads, decoder.head_width, decoder.head_width)
        total = attention_forward(*shape)
        if passes == 3:
            total += attention_backward(*shape, recomputes)
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
