"""What low precision does to sums, to normalization and to the tensors of a model.

`accumulation_table` adds small numbers, `normalization_table` measures errors against fp64, and
`autocast_table` lists the dtypes that autocast gives to the modules of a model.
"""

# N rows, D width
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from steplab.core import Cell, Column, RunSpec, Table
from steplab.core.errors import Unsupported, UserError
from steplab.techniques.precision import TORCH_NAMES
from steplab.techniques.recipes import parse_recipe

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ADDITIONS = 1000
INCREMENT = 0.01
EXACT_SUM = 10.0

SUMMED_NAMES = TORCH_NAMES | {"fp32": "float32", "fp64": "float64"}
# (accumulator, increment, cast): `cast` widens the increment before the addition.
ACCUMULATORS = (
    ("fp32", "fp32", False),
    ("fp16", "fp16", False),
    ("fp32", "fp16", False),
    ("fp32", "fp16", True),
    ("bf16", "bf16", False),
    ("fp32", "bf16", False),
    ("fp64", "fp64", False),
)
ACCUMULATION_COLUMNS = (
    *map(Column, ("accumulator", "increment")),
    Column("result", digits=6),
    *map(Column, ("error", "stalls at step")),
)

ROWS, WIDTH = 64, 1024
MEANS = (0, 10, 100)
SCALES = (1, 300)  # 300 squared is 90,000; the largest fp16 number is 65,504
EPS = 1e-5

NON_FINITE = "non-finite"
NORMALIZATION_COLUMNS = (
    *map(Column, ("op", "dtype", "mean", "scale", "rounding floor", "low statistics")),
    *map(Column, ("fp32 statistics", "torch op", "status")),
)
NORMALIZATION_NOTE = (
    "Numbers are norm(result - truth) / norm(truth); truth is fp64 on the same 16-bit inputs, so "
    "what rounding\nthe inputs costs is not in them. rounding floor: the fp64 answer, only cast to "
    "the dtype. low statistics: every\nintermediate tensor has the dtype (torch's reductions "
    "still add in fp32 inside). fp32 statistics: cast in, cast out.\nstatistics overflow: a mean "
    "square or variance became infinite, its 1/sqrt is 0 and the row is all zeros (error 1)."
)

TOY = "toy"
OK = "ok"
AUTOCAST_COLUMNS = (
    *map(Column, ("model", "device", "autocast", "module", "kind", "count", "parameters")),
    *map(Column, ("output", "gradients", "status")),
)
AUTOCAST_NOTE = (
    "Forward ran under autocast, backward outside it. Which ops autocast keeps in fp32 depends on "
    "the device: CUDA runs\nlayer_norm, softmax and losses in fp32; the CPU leaves layer_norm and "
    "softmax in the dtype of their input. The toy's\nloss is (y - z).mean() with z in fp32, which "
    "promotes y: the loss is float32. A bare y.mean() would stay 16-bit."
)


def accumulation_table(device: torch.device) -> Table:
    """Return one row per pair of dtypes: the sum, its signed error, where it stopped growing."""
    rows = []
    for accumulator, increment, cast in ACCUMULATORS:
        result, stall = accumulate(accumulator, increment, cast, device)
        shown = f"{increment} cast to {accumulator}" if cast else increment
        rows.append((accumulator, shown, result, result - EXACT_SUM, stall or "none"))
    return Table(
        f"accumulation: {INCREMENT} added {ADDITIONS:,} times (exact: {EXACT_SUM:g})",
        ACCUMULATION_COLUMNS,
        tuple(rows),
        "error: result - 10. An fp32 sum of 16-bit increments is off only by the rounding of 0.01 "
        "itself.\nA sum stalls once the increment is less than half the gap to the next number: "
        "bf16 keeps 8 bits of\nsignificand, so from 4.0 on its gap is 0.03125.",
    )


def accumulate(
    accumulator: str, increment: str, cast: bool, device: torch.device
) -> tuple[float, int | None]:
    """Return the sum, and the first step (from 1) at which adding changed nothing, or None."""
    import torch

    total = torch.zeros((), dtype=getattr(torch, SUMMED_NAMES[accumulator]), device=device)
    addend = torch.tensor(INCREMENT, dtype=getattr(torch, SUMMED_NAMES[increment]), device=device)
    if cast:
        addend = addend.to(total.dtype)
    totals = [total.clone()]
    for _ in range(ADDITIONS):
        total += addend  # in place: the accumulator keeps its dtype
        totals.append(total.clone())
    stacked = torch.stack(totals)
    still = (stacked[1:] == stacked[:-1]).nonzero()
    return total.item(), int(still[0]) + 1 if len(still) else None


def normalization_table(device: torch.device, dtypes: Sequence[str]) -> Table:
    """Return one row per op, dtype, mean and scale; inputs are (normal + mean) * scale."""
    import torch

    generator = torch.Generator().manual_seed(0)
    normal_ND = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(device)
    rows = []
    for op, dtype, mean, scale in product(FORMULAS, dtypes, MEANS, SCALES):
        x_ND = ((normal_ND + mean) * scale).to(getattr(torch, TORCH_NAMES[dtype]))
        rows.append((op, dtype, mean, scale, *normalization_errors(op, x_ND)))
    title = f"normalization: relative error against fp64 ({ROWS} rows of {WIDTH:,}, std 1 x scale)"
    return Table(title, NORMALIZATION_COLUMNS, tuple(rows), NORMALIZATION_NOTE)


def normalization_errors(op: str, x_ND: Tensor) -> tuple[float | str, ...]:
    """Return floor, low, fp32 and torch errors of `op` on a 16-bit tensor, and a status."""
    formula = FORMULAS[op]
    truth_ND, _ = formula(x_ND.double())
    low_ND, statistic_N1 = formula(x_ND)
    results = (truth_ND, low_ND, formula(x_ND.float())[0], torch_op(op, x_ND))
    errors = tuple(relative_error(result_ND.to(x_ND.dtype), truth_ND) for result_ND in results)
    status = "ok"
    if NON_FINITE in errors:
        status = "non-finite result"
    elif not statistic_N1.isfinite().all():
        status = "statistics overflow"
    return *errors, status


def relative_error(result_ND: Tensor, truth_ND: Tensor) -> float | str:
    """Return norm(result - truth) / norm(truth), or the word for infinities and NaNs."""
    if not result_ND.isfinite().all():
        return NON_FINITE
    return float((result_ND.double() - truth_ND).norm() / truth_ND.norm())


def rms_norm(x_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Return x / sqrt(mean square) and the mean square, all in the dtype of x."""
    mean_square_N1 = x_ND.square().mean(-1, keepdim=True)
    return x_ND * (mean_square_N1 + EPS).rsqrt(), mean_square_N1


def layer_norm(x_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Return (x - mean) / std and the variance, all in the dtype of x."""
    centered_ND = x_ND - x_ND.mean(-1, keepdim=True)
    variance_N1 = centered_ND.square().mean(-1, keepdim=True)
    return centered_ND * (variance_N1 + EPS).rsqrt(), variance_N1


def softmax(x_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Return exp(x - max) / sum and the sum, all in the dtype of x."""
    exp_ND = (x_ND - x_ND.amax(-1, keepdim=True)).exp()
    total_N1 = exp_ND.sum(-1, keepdim=True)
    return exp_ND / total_N1, total_N1


FORMULAS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "RMSNorm": rms_norm,
    "LayerNorm": layer_norm,
    "softmax": softmax,
}


def torch_op(op: str, x_ND: Tensor) -> Tensor:
    """Return torch's own operation on the tensor as it is."""
    from torch.nn import functional

    if op == "RMSNorm":
        return functional.rms_norm(x_ND, x_ND.shape[-1:], eps=EPS)
    if op == "LayerNorm":
        return functional.layer_norm(x_ND, x_ND.shape[-1:], eps=EPS)
    return x_ND.softmax(-1)


def autocast_table(spec: RunSpec, dtypes: Sequence[str]) -> Table:
    """Return the dtypes in the toy model and in the workload of `spec`, under each autocast dtype.

    A model that cannot run under a dtype is a row whose status says why.
    """
    name = f"{spec.workload.rsplit('/', 1)[-1]} {spec.size}".strip()
    rows: list[tuple[Cell, ...]] = []
    for dtype in dtypes:
        rows += _autocast_rows((TOY, spec.device, dtype), partial(audit_toy, spec.device, dtype))
    for dtype in dtypes:
        rows += _autocast_rows((name, spec.device, dtype), partial(audit_workload, spec, dtype))
    return Table(
        f"dtypes under autocast on {spec.device}", AUTOCAST_COLUMNS, tuple(rows), AUTOCAST_NOTE
    )


def workload_was_audited(table: Table) -> bool:
    """Whether the workload ran under at least one dtype."""
    return any(row[0] != TOY and row[-1] == OK for row in table.rows)


def audit_workload(spec: RunSpec, dtype: str) -> Table:
    """Record the dtypes of one micro-batch of the workload, assembled as for a training step."""
    from steplab.probes.dtypes import audit_dtypes
    from steplab.step.assemble import assemble, micro_batches

    spec = replace(spec, recipe=parse_recipe(f"precision={dtype}"))
    step = assemble(spec)
    batch = next(micro_batches(step, spec))[0]

    def forward() -> Tensor:
        with step.parts.forward_context():
            return step.workload.loss(step.model, batch)[0]

    return audit_dtypes(step.model, forward)


def audit_toy(device: str, dtype: str) -> Table:
    """Record the dtypes of Linear(32, 10) > ReLU > LayerNorm(10) > Linear(10, 32), batch 8."""
    import torch
    from torch import nn

    from steplab.probes.dtypes import audit_dtypes

    layers = OrderedDict[str, nn.Module](
        fc1=nn.Linear(32, 10, bias=False),
        relu=nn.ReLU(),
        norm=nn.LayerNorm(10),
        fc2=nn.Linear(10, 32, bias=False),
    )
    toy = nn.Sequential(layers).to(device)
    x, z = torch.randn(2, 8, 32, device=device)

    def forward() -> Tensor:
        with torch.autocast(device, dtype=getattr(torch, TORCH_NAMES[dtype])):
            loss: Tensor = (toy(x) - z).mean()
        return loss

    return audit_dtypes(toy, forward)


def _autocast_rows(about: tuple[str, ...], audit: Callable[[], Table]) -> list[tuple[Cell, ...]]:
    from steplab.step.failures import first_sentence, is_out_of_memory

    try:
        return [(*about, *row, OK) for row in audit().rows]
    except UserError:
        raise
    except Unsupported as error:
        status = f"unsupported: {error}"
    except Exception as error:
        failed = f"failed: {type(error).__name__}: {first_sentence(error)}"
        status = "oom" if is_out_of_memory(error) else failed
    blank = ("-",) * (len(AUTOCAST_COLUMNS) - len(about) - 1)
    return [(*about, *blank, status)]
