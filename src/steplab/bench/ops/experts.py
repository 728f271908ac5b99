"""Time routed experts: shapes x implementations x routings, with errors against fp64."""

# T tokens, D width, F inner width, E experts, K chosen
from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from steplab.bench.op_bench import (
    COMPILED,
    Config,
    OpAxis,
    OpBench,
    dtype_axis,
    impl_axis,
)
from steplab.core.errors import UserError
from steplab.costs import op_flops

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from steplab.bench.op_accuracy import Accuracy
    from steplab.modules.experts import RoutedExperts

Activation = Literal["gelu", "swiglu"]
Routing = Literal["balanced", "skewed", "collapsed"]
ROUTINGS: tuple[Routing, ...] = ("balanced", "skewed", "collapsed")
MATRICES = {"gelu": 2, "swiglu": 3}
MAX_FLOPS = {"cuda": 6e12, "cpu": 1e10}  # of fp64 products: about a second
DEFINITION = "loop"


def _flops(config: Config) -> tuple[float, float]:
    rows = config["tokens"] * config["top_k"]
    one = op_flops.matmul(rows, config["inner"], config["width"])
    forward = MATRICES[config["activation"]] * one
    return forward, 2 * forward


def _check(values: Mapping[str, Sequence[Any]]) -> None:
    chosen, experts = max(values["top_k"]), min(values["experts"])
    if chosen > experts:
        raise UserError(
            f"A token cannot choose {chosen} of {experts} experts.",
            "Lower --top-k or raise --experts.",
        )


class ExpertsInstance:
    """Stacked experts on random tokens; router weights in fp32, all else in the dtype."""

    def __init__(self, config: Config, seed: int, device: torch.device) -> None:
        import torch

        from steplab.bench.op_cell import compiled_if_asked
        from steplab.bench.op_measure import BoundOp, use_dtype
        from steplab.modules.experts import RoutedExperts

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
        self.experts_TK = assign_experts(config["routing"], T, E, K, seed).to(device)
        weights_TK = normal(T, K).softmax(-1).to(device).requires_grad_()
        x_TD = normal(T, D).to(device, dtype).requires_grad_()
        self.dropped = torch.zeros(())
        layer = compiled_if_asked(config["impl"], self.layer)

        def forward() -> Tensor:
            out_TD, self.dropped = layer(x_TD, weights_TK, self.experts_TK)
            return out_TD

        leaves = _leaves(self.layer, x_TD, weights_TK)
        self.call = BoundOp(forward, leaves, normal(T, D).to(device, dtype))

    def check(self) -> tuple[list[Accuracy], str]:
        """Compare with fp64, on fewer tokens where all of them would take too long."""
        import torch

        from steplab.bench.op_accuracy import check_accuracy

        tokens = self._tokens_in_time()
        if tokens < self.config["tokens"]:
            fewer = ExpertsInstance({**self.config, "tokens": tokens}, self.seed, self.device)
            return fewer.check()[0], f"{tokens:,} tokens instead"
        actual = self.call.results()
        peer = self._by_definition(self.layer.w_in_EFD.dtype)
        truth = self._by_definition(torch.float64)
        return check_accuracy(actual, peer, truth), "all tokens"

    def notes(self) -> list[str]:
        """Say how many assignments were dropped."""
        dropped = float(self.dropped)
        return [f"{dropped:.1%} of the rows dropped"] if dropped else []

    def _by_definition(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return output and gradients expert by expert; router weights in fp32 or better."""
        import torch

        from steplab.bench.op_measure import BoundOp

        twin = copy.deepcopy(self.layer).to(dtype)
        twin.impl = DEFINITION
        x_TD, weights_TK = (self.call.leaves[name].detach() for name in ("x", "weights"))
        x_TD = x_TD.to(dtype).requires_grad_()
        weights_TK = weights_TK.to(torch.promote_types(dtype, torch.float32)).requires_grad_()

        def forward() -> Tensor:
            out_TD: Tensor = twin(x_TD, weights_TK, self.experts_TK)[0]
            return out_TD

        leaves = _leaves(twin, x_TD, weights_TK)
        return BoundOp(forward, leaves, self.call.dout.to(dtype)).results()

    def _tokens_in_time(self) -> int:
        """Return how many tokens fp64 can do in about a second, and in half of the free memory."""
        import torch

        config = self.config
        tokens = int(config["tokens"])
        limit = tokens * MAX_FLOPS[self.device.type] / sum(_flops(config))
        if self.device.type == "cuda":
            per_token = 8 * config["top_k"] * (8 * config["inner"] + 8 * config["width"])
            unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            limit = min(limit, (torch.cuda.mem_get_info()[0] + unused) / 2 / per_token)
        return max(1, min(tokens, int(limit)))


def _leaves(layer: RoutedExperts, x_TD: Tensor, weights_TK: Tensor) -> dict[str, Tensor]:
    matrices = {"w_in": layer.w_in_EFD, "w_out": layer.w_out_EDF}
    return {"x": x_TD, "weights": weights_TK, **matrices}


def assign_experts(routing: str, tokens: int, experts: int, chosen: int, seed: int) -> Tensor:
    """Return (T, K) int64: K different experts for every token, the same on every machine.

    balanced: every expert gets as many rows as any other, give or take one. skewed: expert e is
    drawn with weight 1 / (e + 1), as words are in a text. collapsed: all tokens go to the first K
    experts.
    """
    import torch

    if routing == "collapsed":
        return torch.arange(chosen).expand(tokens, chosen).contiguous()
    generator = torch.Generator().manual_seed(seed)
    if routing == "balanced":
        start_T1 = torch.randperm(tokens, generator=generator)[:, None] * chosen
        return (start_T1 + torch.arange(chosen)) % experts
    uniform_TE = torch.rand(tokens, experts, generator=generator).clamp_min(1e-30)
    # The top K of log(weight) + Gumbel noise are K draws without replacement.
    gumbel_TE = -(-uniform_TE.log()).log()
    weight_E = 1 / (1 + torch.arange(experts))
    return (weight_E.log() + gumbel_TE).topk(chosen).indices


BENCH = OpBench(
    name="experts",
    kernel="experts",
    axes=(
        OpAxis("tokens", "number of tokens", gpu=[65536], cpu=[1024]),
        OpAxis("width", "width of a token", gpu=[768], cpu=[64]),
        OpAxis("inner", "inner width of an expert", gpu=[3072], cpu=[256]),
        OpAxis("experts", "number of experts", gpu=[8], cpu=[8]),
        OpAxis("top_k", "experts per token", gpu=[2], cpu=[2]),
        OpAxis("activation", "gelu or swiglu", gpu=["gelu"], cpu=["gelu"], kind=Activation),
        OpAxis(
            "routing",
            "balanced, skewed (expert e in proportion to 1 / (e + 1)) or collapsed (all tokens to "
            "the first experts)",
            gpu=ROUTINGS,
            cpu=ROUTINGS,
            kind=Routing,
        ),
        dtype_axis(),
        impl_axis(
            gpu=["in_product", "fused", "grouped", "capacity", "loop"],
            cpu=["grouped", "capacity", "loop"],
        ),
    ),
    build=ExpertsInstance,
    size="T{tokens} {routing} {dtype} {impl}",
    results=("out", "dx", "dweights", "dw_in", "dw_out"),
    flops=_flops,
    flops_note="2 matrices per expert (swiglu: 3) over tokens x top-k rows, twice that backward; "
    "dropped rows are counted, so an implementation that drops some shows too many FLOP/s",
    x_axis="tokens",
    check=_check,
)
