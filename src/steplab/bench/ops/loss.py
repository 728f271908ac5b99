"""Time head and loss: shapes x implementations, with errors against fp64."""

# T tokens, C tokens of one piece, D width, V vocabulary
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from steplab.bench.op_bench import COMPILED, Config, OpAxis, OpBench, dtype_axis, impl_axis
from steplab.costs import op_flops

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from steplab.bench.op_accuracy import Accuracy

Reduction = Literal["mean", "none"]
Weight = Literal["same", "fp32"]
WHOLE = "reference"  # the implementation that holds all logits
LEAN = "triton_lean"  # the one that computes them twice, for a mean too
WEIGHT_IN = "weight in "  # before the dtype of the weight, in a cell's config
MAX_FLOPS = {"cuda": 6e12, "cpu": 1e10}  # of fp64 products: about a second
MAX_LOGITS = {"cuda": 2**26, "cpu": 2**22}  # held at once while checking
SIGMAS = 4
# One product over all tokens rounds after every token, the definition in pieces only at their
# borders: a word's row of the gradient, which one token may make up alone, drifts by one rounding
# of fp32 times the square root of the number of tokens.
SUM_UNIT = 2.0**-24


def _flops(config: Config) -> tuple[float, float]:
    product = op_flops.matmul(config["tokens"], config["vocabulary"], config["width"])
    impl = config["impl"].removeprefix(COMPILED)
    if impl == WHOLE:
        return product, 2 * product
    at_once = config["reduction"] == "mean" and impl != LEAN
    return (3 * product, 0.0) if at_once else (product, 3 * product)


def _name_weight(config: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Return the cell with its weight in words: `weight in bf16`."""
    dtype = config["dtype"] if config["weight"] == "same" else config["weight"]
    return ({**config, "weight": f"{WEIGHT_IN}{dtype}"},)


class LossInstance:
    """Random hidden states, a head whose logits have size 1, random targets."""

    def __init__(self, config: Config, seed: int, device: torch.device) -> None:
        import torch

        from steplab.bench.op_cell import compiled_if_asked
        from steplab.bench.op_measure import TORCH_DTYPES, BoundOp, use_dtype
        from steplab.kernels import cross_entropy as op

        self.config, self.seed, self.device = config, seed, device
        dtype = use_dtype(config["dtype"], device)
        weight_dtype = TORCH_DTYPES[config["weight"].removeprefix(WEIGHT_IN)]
        T, D, V = (config[name] for name in ("tokens", "width", "vocabulary"))
        generator = torch.Generator().manual_seed(seed)
        x_TD = torch.randn(T, D, generator=generator).to(device, dtype).requires_grad_()
        weight_VD = torch.randn(V, D, generator=generator).div_(D**0.5)
        weight_VD = weight_VD.to(device, weight_dtype).requires_grad_()
        self.targets_T = torch.randint(V, (T,), generator=generator).to(device)
        shape = () if config["reduction"] == "mean" else (T,)
        d_loss = torch.randn(shape, generator=generator).to(device)
        impl = op.choose(config["impl"].removeprefix(COMPILED), x_TD, weight_VD, self.targets_T)
        reduction = config["reduction"]
        loss = compiled_if_asked(
            config["impl"], lambda x, w, targets: op.cross_entropy(impl, x, w, targets, reduction)
        )
        leaves = {"x": x_TD, "weight": weight_VD}
        self.call = BoundOp(lambda: loss(x_TD, weight_VD, self.targets_T), leaves, d_loss)

    def check(self) -> tuple[list[Accuracy], str]:
        """Compare with fp64, on fewer tokens where all of them would take too long."""
        import torch

        from steplab.bench.op_accuracy import AccuracyCheck

        T, D, V = (self.config[name] for name in ("tokens", "width", "vocabulary"))
        tokens = max(1, min(T, int(MAX_FLOPS[self.device.type] / (3 * 2.0 * D * V))))
        if tokens < T:
            fewer = LossInstance({**self.config, "tokens": tokens}, self.seed, self.device)
            return fewer.check()[0], f"{tokens:,} tokens instead"
        actual = self.call.results()
        peer, truth = (self._by_definition(dtype) for dtype in (None, torch.float64))
        found = []
        for name in actual:
            slack = self._mean_slack() if actual[name].ndim == 0 else 0.0
            check = AccuracyCheck(name, slack)
            drift = SUM_UNIT * T**0.5 if name == "dweight" else 0.0
            check.add(actual[name], peer[name], truth[name], drift)
            found.append(check.result())
        return found, "all tokens"

    def notes(self) -> list[str]:
        """Return nothing: what was asked for is what ran."""
        return []

    def _by_definition(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Return loss and gradients by the definition, in `dtype` or in that of the inputs.

        A few tokens at a time: logits are never whole, and the weight's gradient is summed in fp32
        or better, as one product over all tokens does.
        """
        import torch

        from steplab.kernels import cross_entropy as op
        from steplab.kernels.cross_entropy import reference

        x_TD, weight_VD = (
            leaf.detach().to(dtype or leaf.dtype) for leaf in self.call.leaves.values()
        )
        T, V, mean = len(x_TD), len(weight_VD), self.config["reduction"] == "mean"
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        d_losses_T = (self.call.dout.to(wide) / (T if mean else 1)).expand(T)
        losses_T, dx_TD = x_TD.new_empty(T, dtype=wide), torch.empty_like(x_TD)
        dweight_VD = torch.zeros_like(weight_VD, dtype=wide)
        rows = max(1, MAX_LOGITS[self.device.type] // V)
        for start in range(0, T, rows):
            piece = slice(start, min(start + rows, T))
            x_CD, w_VD = (t.detach().requires_grad_() for t in (x_TD[piece], weight_VD))
            losses_C = reference.per_token(x_CD, w_VD, self.targets_T[piece], op.IGNORE_INDEX)
            dx_CD, d_VD = torch.autograd.grad(losses_C, (x_CD, w_VD), d_losses_T[piece])
            losses_T[piece], dx_TD[piece] = losses_C.detach(), dx_CD
            dweight_VD += d_VD
        out = losses_T.mean() if mean else losses_T
        return {"out": out, "dx": dx_TD, "dweight": dweight_VD.to(weight_VD.dtype)}

    def _mean_slack(self) -> float:
        """Return how far a mean may be off, as a share of it: the peer may be right by chance.

        Every token's logits, of size 1, are rounded separately; the loss is log V or more.
        """
        import torch

        unit = torch.finfo(self.call.leaves["x"].dtype).eps / 2
        return float(SIGMAS * unit / self.config["tokens"] ** 0.5)


BENCH = OpBench(
    name="loss",
    kernel="cross_entropy",
    axes=(
        OpAxis("tokens", "number of tokens", gpu=[16384], cpu=[1024]),
        OpAxis("width", "width of a token", gpu=[768], cpu=[64]),
        # Of one word the loss is 0, and so is every gradient.
        OpAxis("vocabulary", "words of the vocabulary", gpu=[50257], cpu=[8001], minimum=2),
        OpAxis(
            "reduction",
            "mean (one loss) or none (one for every token)",
            gpu=["mean"],
            cpu=["mean"],
            kind=Reduction,
        ),
        dtype_axis(),
        OpAxis(
            "weight",
            "dtype of the head: same (as the inputs) or fp32 (as under autocast)",
            gpu=["same"],
            cpu=["same"],
            kind=Weight,
        ),
        impl_axis(
            gpu=["compiled-reference", "reference", "chunked", "triton_chunked", "triton_lean"],
            cpu=["compiled-reference", "reference", "chunked"],
        ),
    ),
    build=LossInstance,
    size="T{tokens} D{width} V{vocabulary} {reduction} {dtype} {impl}",
    results=("out", "dx", "dweight"),
    flops=_flops,
    flops_note="a product of tokens x vocabulary x width forward and two backward; in chunks all "
    "three in the forward of a mean, or three in the backward, which computes the logits again",
    x_axis="tokens",
    expand=_name_weight,
)
