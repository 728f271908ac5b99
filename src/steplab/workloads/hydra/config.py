"""Shapes and routing forms of HYDRA. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from steplab.core.errors import UserError
from steplab.core.spec import MOST_LAYERS, option, require_at_most, require_positive
from steplab.workloads.workload import check_context

COMPRESSION = 4  # attention works in a quarter of the width
KERNEL = 3  # taps of each of the two convolutions
BYTES = 256


@dataclass(frozen=True)
class HydraConfig:
    """`mod` routes tokens around the feed-forward, `mor` decides how often it is repeated.

    mod: `dense` takes all tokens; `top-k` the best `capacity` of each sequence; `soft` all of them,
    weighted. mor: `fixed` makes all passes; `masked` computes all and each token keeps its own
    number; `soft` is a weighted mean over passes; `capacity` takes fewer tokens in each pass, by
    rank, with fixed shapes; `packed` computes `masked` on the tokens that need it, so shapes vary.
    `threshold`, in both, is how generation routes: by a token's own score.
    """

    width: int = option(768, "width of the residual stream")
    ff_width: int = option(2304, "hidden width of the SwiGLU feed-forward")
    blocks: int = option(8, "number of blocks")
    recursions: int = option(4, "passes through each block's feed-forward")
    heads: int = option(12, "query heads; they share a quarter of the width")
    kv_heads: int = option(3, "key and value heads; must divide the heads")
    context: int = option(1024, "tokens per sequence")
    max_context: int = option(8192, "longest sequence the rotary table covers")
    vocab_size: int = option(50_257, "number of tokens in the vocabulary")
    attention: Literal["hydra", "paper"] = option("hydra", "whose convolutions, means and scales")
    mod: Literal["dense", "top-k", "soft", "threshold"] = option(
        "top-k", "which tokens the middle blocks' feed-forward takes"
    )
    capacity: float = option(0.5, "share of the tokens that top-k takes")
    mod_gate: Literal["router", "one"] = option(
        "router", "weight of a taken token; `one` cuts the router off from the gradient of the task"
    )
    mor: Literal["fixed", "masked", "soft", "capacity", "packed", "threshold"] = option(
        "fixed", "how many passes a token makes"
    )
    min_depth: int = option(0, "passes that every token makes beyond the first")
    aux_factor: float = option(0.1, "weight of the loss that keeps the share near the capacity")
    ponder_factor: float = option(0.01, "weight of the loss on depth and its spread")
    advantage_factor: float = option(0.1, "weight of the loss that sends hard tokens deeper")
    router_warmup: int = option(1000, "updates until the losses on depth count in full")
    rope_theta: float = option(10_000.0, "base of the rotary frequencies")

    def __post_init__(self) -> None:
        counts = ("width", "ff_width", "blocks", "recursions", "heads", "kv_heads", "context")
        require_positive(self, *counts, "vocab_size", "router_warmup")
        require_at_most(self, MOST_LAYERS, "blocks", "recursions")
        for name in ("aux_factor", "ponder_factor", "advantage_factor"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} must not be negative, but is {getattr(self, name)}.")
        if not 0 < self.rope_theta < math.inf:
            raise UserError(f"rope_theta must be more than 0, not {self.rope_theta}.")
        self._check_heads()
        self._check_routing()
        check_context(self.context, self.max_context)

    def _check_heads(self) -> None:
        if self.width % (2 * COMPRESSION * self.heads):
            raise UserError(
                f"A quarter of the width {self.width} does not split into {self.heads} heads of "
                "even width.",
                f"Choose a width that is a multiple of {2 * COMPRESSION * self.heads}.",
            )
        if self.heads % self.kv_heads:
            raise UserError(f"{self.kv_heads} kv_heads do not divide {self.heads} heads.")

    def _check_routing(self) -> None:
        if not 0 < self.capacity <= 1:
            raise UserError(f"capacity must lie above 0 and not above 1, not {self.capacity}.")
        if not 0 <= self.min_depth < self.recursions:
            raise UserError(
                f"min_depth must lie between 0 and {self.recursions - 1}, not {self.min_depth}."
            )
        if self.mor == "packed" and self.mod == "top-k":
            raise UserError(
                "mor packed mixes the tokens of all sequences, but mod top-k chooses within each.",
                "Use --mod dense, soft or threshold, or --mor masked.",
            )

    @property
    def latent(self) -> int:
        """Width that attention works in: all query heads side by side."""
        return self.width // COMPRESSION

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.latent // self.heads

    @property
    def kv_width(self) -> int:
        """All key heads side by side."""
        return self.kv_heads * self.head_width

    @property
    def mod_blocks(self) -> int:
        """Blocks whose feed-forward is routed: all but the first and the last."""
        return max(0, self.blocks - 2)

    def taken(self, tokens: int) -> int:
        """Tokens out of `tokens` that top-k takes."""
        return max(1, int(self.capacity * tokens))

    def pass_sizes(self, tokens: int) -> tuple[int, ...]:
        """Tokens out of `tokens` in each pass of the form `capacity`: all, then evenly fewer."""
        steps = self.recursions - self.min_depth
        falling = (steps - max(0, i - self.min_depth) for i in range(self.recursions))
        return tuple(-(-tokens * left // steps) for left in falling)


# Names, shapes and loss weights as published; names are the announced sizes, not the real ones.
# 100m-trainer has the feed-forward that the trainer hard-codes.
PRESETS = {
    "tiny": HydraConfig(
        128, 384, 4, 2, heads=4, kv_heads=2, context=128, vocab_size=BYTES, attention="paper"
    ),
    "as-profiled": HydraConfig(blocks=4, recursions=6),
    "100m": HydraConfig(),
    "100m-trainer": HydraConfig(ff_width=2816),
    "500m": HydraConfig(1792, 6656, 14, 4, heads=28, kv_heads=4, aux_factor=0.025),
    "1b": HydraConfig(1792, 6656, 20, 4, heads=28, kv_heads=4, aux_factor=0.049),
}

# tiny: 300 steps of 1,024 tokens take half a minute on two cores. The others: published rates.
TRAINING = {
    "tiny": {"lr": 3e-3, "batch_size": 8, "steps_per_epoch": 300},
    "100m": {"lr": 6.7e-5, "min_lr": 2e-5},
    "100m-trainer": {"lr": 6.7e-5, "min_lr": 2e-5},
    "500m": {"lr": 5.5e-5, "min_lr": 1.65e-5},
    "1b": {"lr": 3.2e-5, "min_lr": 9.6e-6},
}
