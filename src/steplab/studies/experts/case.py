"""One cell of the routed experts: its inputs, its implementation and its check. Imports torch."""

# T tokens, D width, F inner width, E experts, K chosen
from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from steplab.modules.experts import RoutedExperts
from steplab.spec import RunSpec
from steplab.studies.experts.plan import OP
from steplab.studies.experts.routing import assign
from steplab.studies.ops.accuracy import Deviation, compare
from steplab.studies.ops.case import compiled_if_asked
from steplab.studies.ops.op import COMPILED
from steplab.studies.ops.subject import Subject, use_dtype

MOST_FLOPS = {"cuda": 6e12, "cpu": 1e10}  # of fp64 products: about a second
DEFINITION = "loop"


class ExpertsCase:
    """Stacked experts on random tokens; router weights in fp32, all else in the dtype."""

    def __init__(self, config: Mapping[str, Any], seed: int, device: torch.device) -> None:
        self.config, self.seed, self.device = config, seed, device
        dtype = use_dtype(config["dtype"], device)
        T, D, F, E, K = (config[n] for n in ("tokens", "width", "inner", "experts", "top_k"))
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.layer = RoutedExperts(E, D, F, config["activation"])
        with torch.no_grad():
            self.layer.w_in_EFD.copy_(normal(*self.layer.w_in_EFD.shape) / D**0.5)
            self.layer.w_out_EDF.copy_(normal(*self.layer.w_out_EDF.shape) / F**0.5)
        self.layer.to(device, dtype)
        self.layer.impl = config["impl"].removeprefix(COMPILED)
        self.experts_TK = assign(config["routing"], T, E, K, seed).to(device)
        weights_TK = normal(T, K).softmax(-1).to(device).requires_grad_()
        x_TD = normal(T, D).to(device, dtype).requires_grad_()
        self.dropped = torch.zeros(())
        call = compiled_if_asked(config["impl"], self.layer)

        def forward() -> Tensor:
            out_TD, self.dropped = call(x_TD, weights_TK, self.experts_TK)
            return out_TD

        leaves = _leaves(self.layer, x_TD, weights_TK)
        self.subject = Subject(forward, leaves, normal(T, D).to(device, dtype))

    def check(self) -> tuple[list[Deviation], str]:
        """Compare with fp64, with fewer tokens where all of them would take too long."""
        tokens = self._tokens_in_time()
        if tokens < self.config["tokens"]:
            fewer = ExpertsCase({**self.config, "tokens": tokens}, self.seed, self.device)
            return fewer.check()[0], f"{tokens:,} tokens instead"
        actual = self.subject.results()
        peer = self._by_definition(self.layer.w_in_EFD.dtype)
        truth = self._by_definition(torch.float64)
        return compare(actual, peer, truth), "all tokens"

    def notes(self) -> list[str]:
        """Say how many assignments were dropped."""
        dropped = float(self.dropped)
        return [f"{dropped:.1%} of the rows dropped"] if dropped else []

    def _by_definition(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return output and gradients expert by expert; router weights in fp32 or better."""
        twin = copy.deepcopy(self.layer).to(dtype)
        twin.impl = DEFINITION
        x_TD, weights_TK = (self.subject.leaves[name].detach() for name in ("x", "weights"))
        x_TD = x_TD.to(dtype).requires_grad_()
        weights_TK = weights_TK.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        leaves = _leaves(twin, x_TD, weights_TK)
        forward = lambda: twin(x_TD, weights_TK, self.experts_TK)[0]  # noqa: E731
        return Subject(forward, leaves, self.subject.dout.to(dtype)).results()

    def _tokens_in_time(self) -> int:
        """Return how many tokens fp64 can do in about a second, and in half of the free memory."""
        config = self.config
        tokens = int(config["tokens"])
        limit = tokens * MOST_FLOPS[self.device.type] / sum(OP.flops(config))
        if self.device.type == "cuda":
            per_token = 8 * config["top_k"] * (8 * config["inner"] + 8 * config["width"])
            unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            limit = min(limit, (torch.cuda.mem_get_info()[0] + unused) / 2 / per_token)
        return max(1, min(tokens, int(limit)))


def _leaves(layer: RoutedExperts, x_TD: Tensor, weights_TK: Tensor) -> dict[str, Tensor]:
    matrices = {"w_in": layer.w_in_EFD, "w_out": layer.w_out_EDF}
    return {"x": x_TD, "weights": weights_TK, **matrices}


def build(spec: RunSpec, device: torch.device) -> ExpertsCase:
    """Return the case of one cell."""
    return ExpertsCase(spec.config, spec.seed, device)
