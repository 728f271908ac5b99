"""Which dtypes autocast gives to a workload, and to the toy model of the classic question."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from steplab.errors import Unsupported, UserError
from steplab.record import Column, Table
from steplab.record.table import Cell
from steplab.spec import RunSpec
from steplab.techniques.parse import parse_recipe
from steplab.techniques.precision import TORCH_NAMES

if TYPE_CHECKING:
    from torch import Tensor

TOY = "toy"
OK = "ok"
COLUMNS = (
    *map(Column, ("model", "device", "autocast", "module", "kind", "count", "parameters")),
    *map(Column, ("output", "gradients", "status")),
)
NOTE = (
    "Forward ran under autocast, backward outside it. Which ops autocast keeps in fp32 depends on "
    "the device: CUDA runs\nlayer_norm, softmax and losses in fp32; the CPU leaves layer_norm and "
    "softmax in the dtype of their input. The toy's\nloss is (y - z).mean() with z in fp32, which "
    "promotes y: the loss is float32. A bare y.mean() would stay 16-bit."
)


def dtype_audit(spec: RunSpec, dtypes: Sequence[str]) -> Table:
    """Return the audits of the toy and of the workload of `spec` under autocast to each dtype.

    A model that cannot run under a dtype is a row whose status says why.
    """
    name = f"{spec.workload.rsplit('/', 1)[-1]} {spec.size}".strip()
    rows: list[tuple[Cell, ...]] = []
    for dtype in dtypes:
        rows += _rows((TOY, spec.device, dtype), partial(audit_toy, spec.device, dtype))
    for dtype in dtypes:
        rows += _rows((name, spec.device, dtype), partial(audit_workload, spec, dtype))
    return Table(f"dtypes under autocast on {spec.device}", COLUMNS, tuple(rows), NOTE)


def workload_was_audited(table: Table) -> bool:
    """Whether the workload could be audited under at least one dtype."""
    return any(row[0] != TOY and row[-1] == OK for row in table.rows)


def audit_workload(spec: RunSpec, dtype: str) -> Table:
    """Audit one micro-batch of the workload, assembled as a training step would be."""
    from steplab.engine.assemble import assemble, micro_batches
    from steplab.probes.dtypes import audit

    spec = replace(spec, recipe=parse_recipe(f"precision={dtype}"))
    step = assemble(spec)
    batch = next(micro_batches(step, spec))[0]

    def forward() -> Tensor:
        with step.parts.forward_context():
            return step.workload.loss(step.model, batch)[0]

    return audit(step.model, forward)


def audit_toy(device: str, dtype: str) -> Table:
    """Audit Linear(32, 10) > ReLU > LayerNorm(10) > Linear(10, 32) on a batch of 8."""
    import torch
    from torch import nn

    from steplab.probes.dtypes import audit

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

    return audit(toy, forward)


def _rows(about: tuple[str, ...], take: Callable[[], Table]) -> list[tuple[Cell, ...]]:
    from steplab.engine.trial import is_out_of_memory

    try:
        return [(*about, *row, OK) for row in take().rows]
    except UserError:
        raise
    except Unsupported as error:
        status = f"unsupported: {error}"
    except Exception as error:
        reason = " ".join(str(error).split()).split(". ")[0][:200]
        status = "oom" if is_out_of_memory(error) else f"failed: {type(error).__name__}: {reason}"
    blank = ("-",) * (len(COLUMNS) - len(about) - 1)
    return [(*about, *blank, status)]
