"""Inputs for tests of the ComplexEMA, and the gradients of any implementation."""

from dataclasses import dataclass

import torch

from steplab.kernels import ema as op
from steplab.kernels.ema import EMAParameters
from tests.kernels.case import Named
from tests.kernels.mismatch import assert_sequences

EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Case(Named):
    """One shape. `memory` is added to the logits of alpha and delta: -4 remembers 3000 steps."""

    batch: int = 1
    length: int = 20
    width: int = 4
    modes: int = 2
    state: bool = False
    last: bool = False
    memory: float = 0.0
    dtype: torch.dtype = torch.float32
    seed: int = 0


@dataclass(frozen=True)
class Inputs:
    """Everything in one dtype; the parameters at least in fp32. None: not part of the case."""

    x: torch.Tensor
    parameters: EMAParameters
    state: torch.Tensor | None
    dy: torch.Tensor
    dlast: torch.Tensor | None

    def double(self):
        def wide(x):
            return None if x is None else x.double()

        parameters = EMAParameters(*(p.double() for p in self.parameters))
        return Inputs(wide(self.x), parameters, wide(self.state), wide(self.dy), wide(self.dlast))


def make(case: Case, device="cpu") -> Inputs:
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    B, L, D, N = case.batch, case.length, case.width, case.modes
    alpha, delta = (0.2 * normal(D, N) + case.memory for _ in range(2))
    parameters = EMAParameters(alpha, delta, normal(D), normal(D, N, 2), normal(D))
    x, dy = (normal(B, L, D, dtype=case.dtype) for _ in range(2))
    state, dlast = normal(B, 2, N, D), normal(B, 2, N, D)
    return Inputs(x, parameters, state if case.state else None, dy, dlast if case.last else None)


def results(impl: str, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Return the outputs and all gradients by name."""
    named = {"x": inputs.x, **inputs.parameters._asdict()}
    if inputs.state is not None:
        named["state"] = inputs.state
    leaves = {name: value.detach().clone().requires_grad_() for name, value in named.items()}
    stored = EMAParameters(*(leaves[name] for name in EMAParameters._fields))
    wants_last = inputs.dlast is not None
    y, last = op.ema(impl, leaves["x"], stored, leaves.get("state"), wants_last)
    outputs, upstream = [y], [inputs.dy]
    if wants_last:
        outputs.append(last)
        upstream.append(inputs.dlast)
    gradients = torch.autograd.grad(outputs, list(leaves.values()), upstream)
    found = {"y": y.detach()} | ({"last": last.detach()} if wants_last else {})
    return found | {f"d_{name}": g for name, g in zip(leaves, gradients, strict=True)}


def check(impl: str, case: Case, device="cpu", slack=0.0):
    """Assert that `impl` is about as near to fp64 as the definition in the same dtype is.

    As near is twice the definition's own error, one rounding of the result, and four roundings of
    fp32 for another order of the sums. `slack` is what the algorithm must cost beside that.
    """
    inputs = make(case, device)
    actual, peer = results(impl, inputs), results("sequential", inputs)
    truth = results("sequential", inputs.double())
    assert_sequences(actual, peer, truth, case, 4 * EPS + slack)
