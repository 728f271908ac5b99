"""GPT sizes and settings. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from steplab.core.errors import UserError
from steplab.core.spec import MOST_LAYERS, option, require_at_most, require_positive
from steplab.workloads.workload import check_context


@dataclass(frozen=True)
class GPTConfig:
    """Shape of the model and length of its sequences."""

    width: int = option(768, "width of the residual stream")
    ff_width: int = option(3072, "hidden width of the SwiGLU feed-forward")
    layers: int = option(12, "number of blocks")
    heads: int = option(12, "attention heads; must divide the width")
    context: int = option(256, "tokens per sequence")
    max_context: int = option(8192, "longest sequence the rotary table covers")
    vocab_size: int = option(10_000, "number of tokens in the vocabulary")
    rope_theta: float = option(10_000.0, "base of the rotary frequencies")
    fused_projections: bool = option(False, "one matmul for q, k, v and one for gate, up")

    def __post_init__(self) -> None:
        require_positive(self, "width", "ff_width", "layers", "heads", "context", "vocab_size")
        require_at_most(self, MOST_LAYERS, "layers")
        if not 0 < self.rope_theta < math.inf:
            raise UserError(f"rope_theta must be more than 0, not {self.rope_theta}.")
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise UserError(
                f"width {self.width} does not split into {self.heads} heads of even width.",
                "Choose heads so that width / heads is an even number.",
            )
        check_context(self.context, self.max_context)

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads


PRESETS = {
    "tiny": GPTConfig(128, 512, layers=4, heads=4, context=128, vocab_size=1024),
    "small": GPTConfig(768, 3072, layers=12, heads=12),
    "medium": GPTConfig(1024, 4096, layers=24, heads=16),
    "large": GPTConfig(1280, 5120, layers=36, heads=20),
    "xl": GPTConfig(1600, 6400, layers=48, heads=25),
    "2.7b": GPTConfig(2560, 10240, layers=32, heads=32),
}

TRAINING = {"tiny": {"lr": 3e-3, "batch_size": 8, "steps_per_epoch": 300, "log_every": 50}}
