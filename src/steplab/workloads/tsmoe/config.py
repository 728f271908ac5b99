"""Shapes of the time-series mixture of experts. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from steplab.core.errors import UserError
from steplab.core.spec import (
    LONGEST_CONTEXT,
    MOST_LAYERS,
    option,
    require_at_most,
    require_positive,
)


@dataclass(frozen=True)
class TsmoeConfig:
    """Shape of the model and length of its windows.

    The layout `gelu` has two-matrix GELU experts, biased heads and no final norm; `time-moe` is
    that of the Time-MoE models: SwiGLU experts, unbiased heads, a final norm and their own
    definition of the balancing loss.
    """

    hidden_size: int = option(768, "width of the residual stream")
    n_decoder_layers: int = option(12, "number of blocks")
    n_head: int = option(12, "attention heads; must divide the hidden size")
    num_experts: int = option(8, "routed experts per mixture layer")
    k: int = option(2, "experts per token")
    d_ff: int = option(3072, "inner width of the shared expert")
    d_expert: int = option(3072, "inner width of a routed expert")
    num_expert_layers: int = option(1, "mixture layers in sequence per block")
    seq_max_len: int = option(4096, "points per training window")
    patch_length: int = option(1, "points per token")
    horizons: str = option("1,8,32,64", "points that each head predicts")
    layout: Literal["gelu", "time-moe"] = option("gelu", "experts, heads and final norm")
    aux_factor: float = option(0.02, "weight of the load-balancing loss")
    huber_delta: float = option(2.0, "where the loss turns from quadratic to linear")
    rope_theta: float = option(10_000.0, "base of the rotary frequencies")
    quantiles: str = option("", "quantile levels to predict too, as in 0.1,0.5,0.9; default: none")

    def __post_init__(self) -> None:
        counts = ("hidden_size", "n_decoder_layers", "n_head", "num_experts", "k", "d_ff")
        require_positive(
            self, *counts, "d_expert", "num_expert_layers", "seq_max_len", "patch_length"
        )
        require_at_most(self, MOST_LAYERS, "n_decoder_layers", "num_expert_layers")
        require_at_most(self, LONGEST_CONTEXT, "seq_max_len")
        if self.hidden_size % self.n_head or (self.hidden_size // self.n_head) % 2:
            raise UserError(
                f"hidden_size {self.hidden_size} does not split into {self.n_head} heads of even "
                "width.",
                "Choose n_head so that hidden_size / n_head is an even number.",
            )
        for name in ("huber_delta", "rope_theta"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} must be more than 0, not {getattr(self, name)}.")
        if not 0 <= self.aux_factor < math.inf:
            raise UserError(f"aux_factor must not be negative, but is {self.aux_factor}.")
        _ = self.quantile_levels
        if self.k > self.num_experts:
            raise UserError(f"k {self.k} is more than the {self.num_experts} experts.")
        if self.seq_max_len % self.patch_length:
            raise UserError(
                f"seq_max_len {self.seq_max_len} is not a multiple of patch_length "
                f"{self.patch_length}."
            )
        if self.seq_max_len <= max(self.horizon_lengths):
            raise UserError(
                f"seq_max_len {self.seq_max_len} is not longer than the longest horizon "
                f"{max(self.horizon_lengths)}.",
                "Choose longer windows or shorter --horizons.",
            )

    @property
    def horizon_lengths(self) -> tuple[int, ...]:
        """The horizons as numbers, in points."""
        try:
            lengths = tuple(int(word) for word in self.horizons.split(","))
        except ValueError:
            lengths = ()
        if not lengths or min(lengths) < 1:
            raise UserError(f"horizons {self.horizons!r} must be numbers, as in 1,8,32,64.")
        return lengths

    @property
    def quantile_levels(self) -> tuple[float, ...]:
        """The levels of the quantiles as numbers, from low to high; () for a point model."""
        try:
            levels = tuple(float(word) for word in self.quantiles.split(",") if self.quantiles)
        except ValueError:
            levels = (math.nan,)
        rising = all(low < high for low, high in pairwise((0.0, *levels, 1.0)))
        if not rising:
            raise UserError(
                f"quantiles {self.quantiles!r} must be rising numbers between 0 and 1, as in "
                "0.1,0.5,0.9."
            )
        return levels

    @property
    def outputs(self) -> int:
        """Numbers predicted after every token: points of all horizons, and their quantiles."""
        return sum(self.horizon_lengths) * (1 + len(self.quantile_levels))

    @property
    def activation(self) -> str:
        """The experts' activation."""
        return "swiglu" if self.layout == "time-moe" else "gelu"

    @property
    def tokens(self) -> int:
        """Tokens per window."""
        return self.seq_max_len // self.patch_length

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.n_head


PRESETS = {
    "tiny": TsmoeConfig(64, 3, 4, num_experts=4, d_ff=128, d_expert=64, seq_max_len=256),
    # The default of `steplab train` on a CPU: its window is long enough to see a period.
    "starter": TsmoeConfig(
        hidden_size=128,
        n_decoder_layers=3,
        n_head=8,
        num_experts=4,
        d_ff=128,
        d_expert=64,
        seq_max_len=512,
        patch_length=32,
        huber_delta=0.05,
        rope_theta=100.0,
    ),
    "small": TsmoeConfig(384, 12, 12, d_ff=1536, d_expert=192),
    "flagship": TsmoeConfig(768, 12, 12, d_ff=3072, d_expert=3072),
    # The same proportions with a third of the layers, half the width and a quarter of the context:
    # small enough to train a thousand steps, several times, to see whether a recipe learns.
    "flagship-reduced": TsmoeConfig(384, 4, 6, d_ff=1536, d_expert=1536, seq_max_len=1024),
    "time-moe-50m": TsmoeConfig(384, 12, 12, d_ff=1536, d_expert=768, layout="time-moe"),
    "time-moe-200m": TsmoeConfig(768, 12, 12, d_ff=3072, d_expert=1536, layout="time-moe"),
}

# The best of about 25 runs by MASE on generated series held out for this choice (seed 1000045).
TRAINING = {
    "starter": {
        "lr": 5e-3,
        "batch_size": 32,
        "steps_per_epoch": 2400,
        "log_every": 200,
        "validate_every": 600,
        "checkpoint_every": 600,
    }
}
