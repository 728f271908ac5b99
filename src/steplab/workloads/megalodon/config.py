"""Megalodon's sizes and settings. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from steplab.core.errors import UserError
from steplab.core.spec import (
    LONGEST_CONTEXT,
    MOST_LAYERS,
    option,
    require_at_most,
    require_positive,
)


@dataclass(frozen=True)
class MegalodonConfig:
    """Shape of the model and length of its sequences."""

    width: int = option(1024, "width of the residual stream")
    layers: int = option(12, "number of blocks")
    heads: int = option(1, "attention heads; must divide shared_width and value_width")
    shared_width: int = option(
        256, "width of the projection that queries and keys share, all heads"
    )
    value_width: int = option(2048, "width of the values, all heads")
    ff_width: int = option(2560, "hidden width of the feed-forward")
    modes: int = option(16, "complex moving averages per channel")
    norm_groups: int = option(32, "groups of channels of a timestep norm; must divide the width")
    chunk: int = option(2048, "tokens per chunk; attention does not cross chunks")
    context: int = option(4096, "tokens per sequence")
    vocab_size: int = option(32_000, "number of tokens in the vocabulary")
    rope_theta: float = option(10_000.0, "base of the rotary frequencies")
    eps: float = option(1e-5, "added to the variance in norms")
    swiglu: bool = option(False, "gate the feed-forward")
    rescale_ff: bool = option(False, "learn a factor per channel of the feed-forward's output")
    scale_embedding: bool = option(False, "multiply embeddings by the square root of the width")
    tied: bool = option(False, "use the embedding as the head")

    def __post_init__(self) -> None:
        counts = ("width", "layers", "heads", "shared_width", "value_width", "ff_width", "modes")
        require_positive(self, *counts, "norm_groups", "chunk", "context", "vocab_size")
        require_at_most(self, MOST_LAYERS, "layers")
        require_at_most(self, LONGEST_CONTEXT, "chunk", "context")
        if not 0 < self.rope_theta < math.inf or not 0 < self.eps < math.inf:
            raise UserError("rope_theta and eps must be more than 0.")
        if self.value_width % self.heads or self.shared_width % (2 * self.heads):
            raise UserError(
                f"shared_width {self.shared_width} and value_width {self.value_width} do not split "
                f"into {self.heads} heads whose queries have an even width.",
                "Choose heads so that shared_width / heads is even and value_width / heads whole.",
            )
        if self.width % self.norm_groups:
            raise UserError(
                f"width {self.width} does not split into {self.norm_groups} norm groups.",
                "Choose norm_groups so that it divides width.",
            )

    @property
    def head_width(self) -> int:
        """Width of a head's queries and keys."""
        return self.shared_width // self.heads

    @property
    def value_head_width(self) -> int:
        """Width of a head's values."""
        return self.value_width // self.heads


_1_3B = MegalodonConfig(
    width=2048,
    layers=24,
    heads=2,
    shared_width=512,
    value_width=4096,
    ff_width=4864,
    norm_groups=64,
)
_7B = MegalodonConfig(
    width=4096,
    layers=32,
    heads=4,
    shared_width=1024,
    value_width=8192,
    ff_width=11264,
    norm_groups=64,
)
_7_3B = replace(_7B, ff_width=8192, swiglu=True)

PRESETS = {
    "tiny": MegalodonConfig(
        width=96,
        layers=2,
        heads=2,
        shared_width=64,
        value_width=128,
        ff_width=192,
        modes=8,
        norm_groups=8,
        chunk=64,
        context=128,
        vocab_size=256,
    ),
    # 8.9M parameters: small enough to profile in seconds.
    "playbook": MegalodonConfig(
        width=384,
        layers=6,
        heads=3,
        shared_width=192,
        value_width=384,
        ff_width=1024,
        modes=8,
        chunk=512,
        context=2048,
        vocab_size=256,
        eps=1e-6,
        tied=True,
    ),
    "mega200m": MegalodonConfig(),
    "mega1.3b": _1_3B,
    "mega1.3b-pg19": replace(_1_3B, ff_width=3584, swiglu=True, tied=True, scale_embedding=True),
    "mega7.1b": _7B,
    "mega7.3b": _7_3B,
    "mega7b-paper": replace(_7_3B, chunk=4096, context=8192, rope_theta=100_000.0),
}

TRAINING: Mapping[str, Mapping[str, Any]] = {
    "tiny": {"lr": 3e-3, "batch_size": 8, "steps_per_epoch": 300, "log_every": 50},
}
