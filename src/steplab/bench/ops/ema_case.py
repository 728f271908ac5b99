"""One cell of the ComplexEMA: its inputs, its implementation and its check. Imports torch."""

# B batch, L steps of time, D channels, N modes, K channels that are checked
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from steplab.bench.op_accuracy import Accuracy, check_accuracy
from steplab.bench.op_bench import COMPILED
from steplab.bench.op_cell import compiled_if_asked
from steplab.bench.op_measure import OpCall, use_dtype
from steplab.core import RunSpec
from steplab.kernels import ema as ema_op
from steplab.kernels.ema import EMAParameters

NAMES = ("alpha", "delta", "theta", "gamma", "omega")
DEFINITION = "sequential"
MAX_STATES = {"cuda": 2**27, "cpu": 2**22}  # that the definition keeps for its backward, in all
MAX_STEPS = {"cuda": 8192, "cpu": 4096}  # it goes step by step: about a second
LONG_MEMORY = -3.0  # logits of every other channel: these remember some hundreds of steps
FOURIER = ("fft", "fft_table")


class EmaInstance:
    """Random inputs; the parameters stay in fp32."""

    def __init__(self, config: Mapping[str, Any], seed: int, device: torch.device) -> None:
        self.config, self.seed, self.device = config, seed, device
        self.dtype = use_dtype(config["dtype"], device)
        B, L, D, N = (config[n] for n in ("batch", "context", "width", "modes"))
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        memory_D1 = LONG_MEMORY * (torch.arange(D, device=device) % 2)[:, None]
        stored = {
            "alpha": 0.2 * normal(D, N) + memory_D1,
            "delta": 0.2 * normal(D, N) + memory_D1,
            "theta": normal(D),
            "gamma": normal(D, N, 2),
            "omega": normal(D),
        }
        leaves = {"x": normal(B, L, D).to(self.dtype), **stored}
        for leaf in leaves.values():
            leaf.requires_grad_()
        self.impl = config["impl"].removeprefix(COMPILED)
        ema_op.choose(self.impl, leaves["x"], _parameters(leaves))
        call = compiled_if_asked(config["impl"], self._call)
        dout = normal(B, L, D).to(self.dtype)
        self.subject = OpCall(lambda: call(*leaves.values()), leaves, dout)

    def _call(self, x_BLD: Tensor, *stored: Tensor) -> Tensor:
        return ema_op.ema(self.impl, x_BLD, EMAParameters(*stored))[0]

    def check(self) -> tuple[list[Accuracy], str]:
        """Compare some channels with fp64: they know nothing of one another."""
        config, kind = self.config, self.device.type
        if config["context"] > MAX_STEPS[kind]:
            shorter = {**config, "context": MAX_STEPS[kind]}
            found, told = EmaInstance(shorter, self.seed, self.device).check()
            return found, f"{MAX_STEPS[kind]:,} steps instead, {told}"
        per_channel = config["batch"] * config["context"] * config["modes"]
        count = max(1, min(config["width"], MAX_STATES[kind] // per_channel))
        width = config["width"]
        chosen_K = torch.linspace(0, width - 1, count, device=self.device).round().long()
        actual = _channels(self.subject.results(), chosen_K)
        inputs = _channels({**self.subject.leaves, "dout": self.subject.dout}, chosen_K)
        peer, truth = (_by_definition(inputs, dtype) for dtype in (self.dtype, torch.float64))
        told = "all channels" if count == width else f"{count} of {width:,} channels"
        return check_accuracy(actual, peer, truth, self._slack()), told

    def _slack(self) -> float:
        """Return what Fourier transforms cost: a rounding of fp32 per halving, three times."""
        if self.impl not in FOURIER:
            return 0.0
        return 3 * math.log2(2 * self.config["context"]) * torch.finfo(torch.float32).eps / 2

    def notes(self) -> list[str]:
        """Nothing to add."""
        return []


def _parameters(leaves: Mapping[str, Tensor]) -> EMAParameters:
    return EMAParameters(*(leaves[name] for name in NAMES))


def _channels(tensors: Mapping[str, Tensor], chosen_K: Tensor) -> dict[str, Tensor]:
    """Return the chosen channels: of (B, L, D) tensors the last axis, of parameters the first."""
    return {
        name: x.detach().index_select(2 if name in ("x", "dx", "out", "dout") else 0, chosen_K)
        for name, x in tensors.items()
    }


def _by_definition(inputs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return output and gradients step by step; parameters in fp32 or better."""
    wide = torch.promote_types(dtype, torch.float32)
    leaves = {"x": inputs["x"].to(dtype)} | {name: inputs[name].to(wide) for name in NAMES}
    for leaf in leaves.values():
        leaf.requires_grad_()

    def forward() -> Tensor:
        return ema_op.ema(DEFINITION, leaves["x"], _parameters(leaves))[0]

    return OpCall(forward, leaves, inputs["dout"].to(dtype)).results()


def build(spec: RunSpec, device: torch.device) -> EmaInstance:
    """Return the case of one cell; an implementation that cannot take it raises Unsupported."""
    return EmaInstance(spec.config, spec.seed, device)
