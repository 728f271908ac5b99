"""Time the ComplexEMA: lengths x implementations, with errors against fp64."""

# B batch, L steps of time, D channels, N modes, K channels that are checked
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from steplab.bench.op_bench import COMPILED, Config, OpAxis, OpBench, dtype_axis, impl_axis
from steplab.bench.op_results import cell_result
from steplab.core import Cell, Column, Run, Table
from steplab.hardware.catalog import find_card

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from steplab.bench.op_accuracy import Accuracy

# Multiply-adds per channel, mode and step of the recurrence: the complex step and its read-out;
# then the reversed one with two sums. A Fourier path does others; all rows are counted alike.
FORWARD, BACKWARD = 6, 14
ITEM_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
PARAMETERS = ("alpha", "delta", "theta", "gamma", "omega")
DEFINITION = "sequential"
FOURIER = ("fft", "fft_table")
MAX_STATES = {"cuda": 2**27, "cpu": 2**22}  # that the definition keeps for its backward, in all
MAX_STEPS = {"cuda": 8192, "cpu": 4096}  # it goes step by step: about a second
LONG_MEMORY = -3.0  # logits of every other channel: these remember some hundreds of steps

BOUND_COLUMNS = (
    Column("context"),
    Column("dtype"),
    Column("impl"),
    Column("forward", "ms"),
    Column("bound", "ms"),
    Column("share", "%", 3),
    Column("backward", "ms"),
    Column("bound", "ms"),
    Column("share", "%", 3),
)


def _elements(config: Config) -> int:
    return int(config["batch"] * config["context"] * config["width"])


def _flops(config: Config) -> tuple[float, float]:
    states = _elements(config) * config["modes"]
    return 2.0 * FORWARD * states, 2.0 * BACKWARD * states


def bytes_moved(config: Config) -> tuple[int, int]:
    """Return the bytes of forward and backward with every large tensor touched once.

    Forward: x and y. Backward: x, dy and dx. Parameters and states are small beside them.
    """
    one = _elements(config) * ITEM_BYTES[config["dtype"]]
    return 2 * one, 3 * one


class EmaInstance:
    """Random inputs; the parameters stay in fp32."""

    def __init__(self, config: Config, seed: int, device: torch.device) -> None:
        import torch

        from steplab.bench.op_cell import compiled_if_asked
        from steplab.bench.op_measure import BoundOp, use_dtype
        from steplab.kernels import ema as ema_op

        self.config, self.seed, self.device = config, seed, device
        self.dtype = use_dtype(config["dtype"], device)
        B, L, D, N = (config[name] for name in ("batch", "context", "width", "modes"))
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
        impl = self.impl = config["impl"].removeprefix(COMPILED)
        ema_op.choose(impl, leaves["x"], ema_op.EMAParameters(*stored.values()))

        def ema(x_BLD: Tensor, *parameters: Tensor) -> Tensor:
            return ema_op.ema(impl, x_BLD, ema_op.EMAParameters(*parameters))[0]

        average = compiled_if_asked(config["impl"], ema)
        dout = normal(B, L, D).to(self.dtype)
        self.call = BoundOp(lambda: average(*leaves.values()), leaves, dout)

    def check(self) -> tuple[list[Accuracy], str]:
        """Compare some channels with fp64: they are independent of one another."""
        import torch

        from steplab.bench.op_accuracy import check_accuracy

        config, kind = self.config, self.device.type
        if config["context"] > MAX_STEPS[kind]:
            shorter = {**config, "context": MAX_STEPS[kind]}
            found, checked = EmaInstance(shorter, self.seed, self.device).check()
            return found, f"{MAX_STEPS[kind]:,} steps instead, {checked}"
        per_channel = config["batch"] * config["context"] * config["modes"]
        count = max(1, min(config["width"], MAX_STATES[kind] // per_channel))
        width = config["width"]
        chosen_K = torch.linspace(0, width - 1, count, device=self.device).round().long()
        actual = _channels(self.call.results(), chosen_K)
        inputs = _channels({**self.call.leaves, "dout": self.call.dout}, chosen_K)
        peer, truth = (_by_definition(inputs, dtype) for dtype in (self.dtype, torch.float64))
        checked = "all channels" if count == width else f"{count} of {width:,} channels"
        return check_accuracy(actual, peer, truth, self._slack()), checked

    def notes(self) -> list[str]:
        """Return nothing: what was asked for is what ran."""
        return []

    def _slack(self) -> float:
        """Return what Fourier transforms cost: a rounding of fp32 per halving, three times."""
        if self.impl not in FOURIER:
            return 0.0
        return 3 * math.log2(2 * self.config["context"]) * 2.0**-24


def _channels(tensors: Mapping[str, Tensor], chosen_K: Tensor) -> dict[str, Tensor]:
    """Return the chosen channels: of (B, L, D) tensors the last axis, of parameters the first."""
    return {
        name: x.detach().index_select(2 if name in ("x", "dx", "out", "dout") else 0, chosen_K)
        for name, x in tensors.items()
    }


def _by_definition(inputs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return output and gradients step by step; parameters in fp32 or better."""
    import torch

    from steplab.bench.op_measure import BoundOp
    from steplab.kernels import ema as ema_op

    wide = torch.promote_types(dtype, torch.float32)
    x_BLD = inputs["x"].to(dtype).requires_grad_()
    stored = {name: inputs[name].to(wide).requires_grad_() for name in PARAMETERS}

    def forward() -> Tensor:
        return ema_op.ema(DEFINITION, x_BLD, ema_op.EMAParameters(*stored.values()))[0]

    return BoundOp(forward, {"x": x_BLD, **stored}, inputs["dout"].to(dtype)).results()


def bound_tables(runs: Sequence[Run]) -> Sequence[Table]:
    """Return one table of the times beside the least that memory bandwidth allows.

    There is none where the bandwidth is not known.
    """
    card = find_card(runs[0].environment.device_name) if runs[0].spec.device == "cuda" else None
    if card is None:
        return ()
    rows: list[tuple[Cell, ...]] = []
    for run in runs:
        if run.status != "ok":
            continue
        config, found = run.spec.config, cell_result(run)
        row: list[Cell] = [config["context"], config["dtype"], BENCH.variant_text(config)]
        times = (found.forward_ms, found.backward_ms)
        for size, ms in zip(bytes_moved(config), times, strict=True):
            least = size / card.bandwidth_gbs / 1e6
            row += [ms, least, 100 * least / ms if ms else None]
        rows.append(tuple(row))
    note = (
        f"bound: x and y once forward, x, dy and dx once backward, at {card.bandwidth_gbs:,.0f} "
        "GB/s by the datasheet"
    )
    return (Table("share of the memory bound", BOUND_COLUMNS, tuple(rows), note),)


BENCH = OpBench(
    name="ema",
    kernel="ema",
    axes=(
        OpAxis("batch", "number of sequences", gpu=[4], cpu=[1]),
        OpAxis("context", "steps of time", gpu=[1024, 4096, 16384], cpu=[128, 512]),
        OpAxis("width", "channels", gpu=[1024], cpu=[64]),
        OpAxis("modes", "complex averages per channel", gpu=[16], cpu=[8]),
        dtype_axis(gpu=["bf16", "fp32"]),
        impl_axis(gpu=["scan", "fft", "fft_table"], cpu=["fft", "fft_table", "sequential"]),
    ),
    build=EmaInstance,
    size="L{context} N{modes} {dtype} {impl}",
    results=("out", "dx", *(f"d{name}" for name in PARAMETERS)),
    flops=_flops,
    flops_note=f"{FORWARD} multiply-adds forward and {BACKWARD} backward per element and mode, "
    "those of the recurrence, for every row alike",
    x_axis="context",
    more_tables=bound_tables,
)
