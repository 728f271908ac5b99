"""One cell of the loss: its inputs, its implementation and its check. Imports torch."""

# T tokens, C tokens of one piece, D width, V vocabulary
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from steplab.bench.op_accuracy import Accuracy, AccuracyCheck
from steplab.bench.op_bench import COMPILED
from steplab.bench.op_cell import compiled_if_asked
from steplab.bench.op_measure import TORCH_DTYPES, OpCall, use_dtype
from steplab.bench.ops.loss import WEIGHT_IN
from steplab.core import RunSpec
from steplab.kernels import cross_entropy as op
from steplab.kernels.cross_entropy import reference

MAX_FLOPS = {"cuda": 6e12, "cpu": 1e10}  # of fp64 products: about a second
MAX_LOGITS = {"cuda": 2**26, "cpu": 2**22}  # held at once while checking
SIGMAS = 4
# One product over all tokens rounds after every token, the definition in pieces only at their
# borders: a word's row of the gradient, which one token may make up alone, wanders by one rounding
# of fp32 times the root of the number of tokens.
SUM_UNIT = torch.finfo(torch.float32).eps / 2


class LossInstance:
    """Random hidden states, a head whose logits have size 1, random targets."""

    def __init__(self, config: Mapping[str, Any], seed: int, device: torch.device) -> None:
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
        self.ran = op.choose(config["impl"].removeprefix(COMPILED), x_TD, weight_VD, self.targets_T)
        ran, reduction = self.ran, config["reduction"]
        call = compiled_if_asked(
            config["impl"], lambda x, w, targets: op.cross_entropy(ran, x, w, targets, reduction)
        )
        leaves = {"x": x_TD, "weight": weight_VD}
        self.subject = OpCall(lambda: call(x_TD, weight_VD, self.targets_T), leaves, d_loss)

    def check(self) -> tuple[list[Accuracy], str]:
        """Compare with fp64, with fewer tokens where all of them would take too long."""
        T, D, V = (self.config[name] for name in ("tokens", "width", "vocabulary"))
        tokens = max(1, min(T, int(MAX_FLOPS[self.device.type] / (3 * 2.0 * D * V))))
        if tokens < T:
            fewer = LossInstance({**self.config, "tokens": tokens}, self.seed, self.device)
            return fewer.check()[0], f"{tokens:,} tokens instead"
        actual = self.subject.results()
        peer, truth = (self._by_definition(dtype) for dtype in (None, torch.float64))
        found = []
        for name in actual:
            slack = self._mean_slack() if actual[name].ndim == 0 else 0.0
            comparison = AccuracyCheck(name, slack, SUM_UNIT * T**0.5 if name == "dweight" else 0.0)
            comparison.add(actual[name], peer[name], truth[name])
            found.append(comparison.result())
        return found, "all tokens"

    def notes(self) -> list[str]:
        """Nothing: what was asked for is what ran."""
        return []

    def _by_definition(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Return loss and gradients by the definition, in `dtype` or in that of the inputs.

        A few tokens at a time: logits are never whole, and the weight's gradient is summed in fp32
        or better, as one product over all tokens does.
        """
        x_TD, weight_VD = (
            leaf.detach().to(dtype or leaf.dtype) for leaf in self.subject.leaves.values()
        )
        T, V, mean = len(x_TD), len(weight_VD), self.config["reduction"] == "mean"
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        d_losses_T = (self.subject.dout.to(wide) / (T if mean else 1)).expand(T)
        losses_T, dx_TD = x_TD.new_empty(T, dtype=wide), torch.empty_like(x_TD)
        dweight_VD = torch.zeros_like(weight_VD, dtype=wide)
        rows = max(1, MAX_LOGITS[self.device.type] // V)
        for start in range(0, T, rows):
            chosen = slice(start, min(start + rows, T))
            x_CD, w_VD = (t.detach().requires_grad_() for t in (x_TD[chosen], weight_VD))
            losses_C = reference.per_token(x_CD, w_VD, self.targets_T[chosen], op.IGNORE_INDEX)
            dx_CD, d_VD = torch.autograd.grad(losses_C, (x_CD, w_VD), d_losses_T[chosen])
            losses_T[chosen], dx_TD[chosen] = losses_C.detach(), dx_CD
            dweight_VD += d_VD
        out = losses_T.mean() if mean else losses_T
        return {"out": out, "dx": dx_TD, "dweight": dweight_VD.to(weight_VD.dtype)}

    def _mean_slack(self) -> float:
        """Return what a mean may differ by, of the loss: the peer may be right by chance.

        Every token's logits, of size 1, are rounded by themselves; the loss is log V or more.
        """
        unit = torch.finfo(self.subject.leaves["x"].dtype).eps / 2
        return float(SIGMAS * unit / self.config["tokens"] ** 0.5)


def build(spec: RunSpec, device: torch.device) -> LossInstance:
    """Return the case of one cell; an implementation that cannot take it raises Unsupported."""
    return LossInstance(spec.config, spec.seed, device)
