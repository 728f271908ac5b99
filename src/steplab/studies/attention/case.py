"""One cell of attention: its inputs, its implementation and its check. Imports torch."""

# B batch, H heads, T queries and keys, D head width
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from steplab.kernels import attention as op
from steplab.kernels.impl import AUTO
from steplab.spec import RunSpec
from steplab.studies.attention import truth
from steplab.studies.attention.plan import FLEX
from steplab.studies.ops.accuracy import Deviation
from steplab.studies.ops.case import compiled_if_asked, compiler_notes
from steplab.studies.ops.op import COMPILED
from steplab.studies.ops.subject import Subject, use_dtype


class AttentionCase:
    """Attention over q, k and v that lie in memory as (B, T, H, D), as projections give them."""

    def __init__(self, config: Mapping[str, Any], seed: int, device: torch.device) -> None:
        self.config, self.seed, self.device = config, seed, device
        self.dtype = use_dtype(config["dtype"], device)
        generator = torch.Generator().manual_seed(seed)
        leaves = {name: self._normal(generator).requires_grad_() for name in ("q", "k", "v")}
        self.ran = ""
        attend = self._attention(*leaves.values())
        self.subject = Subject(lambda: attend(*leaves.values()), leaves, self._normal(generator))

    def check(self) -> tuple[list[Deviation], str]:
        """Compare all heads with fp64; where that takes too long some of them, or a shorter one."""
        batch, heads, context = (self.config[name] for name in ("batch", "heads", "context"))
        cover = truth.coverage(batch * heads, context, self.config["head_width"], self.device.type)
        if cover.context < context:
            shorter = AttentionCase(
                {**self.config, "batch": 1, "heads": 1, "context": cover.context},
                self.seed,
                self.device,
            )
            return shorter.check()[0], f"one head at context {cover.context:,} instead"
        inputs = {**self.subject.leaves, "dout": self.subject.dout}
        found = truth.check(inputs, self.subject.results(), self.config["causal"], cover.heads)
        part = "all" if cover.heads == batch * heads else f"{cover.heads:,} of {batch * heads:,}"
        return found, f"{part} heads"

    def notes(self) -> list[str]:
        """Say what `auto` took, and what torch.compile replaced."""
        chosen = [f"auto ran {self.ran}"] if self.config["impl"].endswith(AUTO) else []
        return [*chosen, *compiler_notes(self.config["impl"])]

    def _normal(self, generator: torch.Generator) -> Tensor:
        shape = [self.config[name] for name in ("batch", "context", "heads", "head_width")]
        x_BTHD = torch.randn(shape, generator=generator).to(self.device, self.dtype)
        return x_BTHD.transpose(1, 2)

    def _attention(self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Callable[..., Tensor]:
        config, causal = self.config, self.config["causal"]
        impl = config["impl"].removeprefix(COMPILED)
        if impl == FLEX:
            from steplab.studies.attention.flex import flex

            return flex(config["context"], causal, self.device)
        self.ran = op.choose(impl, q_BHTD, k_BHTD, v_BHTD, causal)
        if config["tiles"]:
            from steplab.studies.attention.tiles import attention_by

            chosen = attention_by(config["tiles"])
            return lambda q, k, v: chosen(q, k, v, causal)
        ran = self.ran
        return compiled_if_asked(config["impl"], lambda q, k, v: op.attention(ran, q, k, v, causal))


def build(spec: RunSpec, device: torch.device) -> AttentionCase:
    """Return the case of one cell; an implementation that cannot take it raises Unsupported."""
    return AttentionCase(spec.config, spec.seed, device)
