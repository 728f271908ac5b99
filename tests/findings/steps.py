"""Steps for tests of rules: a few words per operator become a trace, analyzed and made a Case."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from steplab.findings import Case
from steplab.trace.analyze import analyze
from tests.trace.traces import call, kernel, op, python, range_, trace_of

H200 = {"deviceProperties": [{"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150_000_000_000}]}
US = 1000
HOST_US = 4  # what the host needs for an operator on a GPU
BF16, FP32 = "c10::BFloat16", "float"


@dataclass(frozen=True)
class RecordedOp:
    """One operator; on a GPU it launches one kernel that takes `us`."""

    op: str
    us: int
    kernel: str = "some_kernel"
    phase: str = "forward"
    module: str = ""
    inside: str = ""  # an operator around it
    line: str = ""  # "model.py(12): forward"
    args: dict[str, Any] = field(default_factory=dict)  # shapes, strides, dtypes, values
    outer: dict[str, Any] = field(default_factory=dict)  # the same of the operator around it
    late_us: int = 0  # by which the host comes later than it could


def mm(
    m: int, k: int, n: int, us: int, dtype: str = BF16, batch: int = 0, **changes: Any
) -> RecordedOp:
    """A product, with a kernel name that does not tell the dtype."""
    front = [batch] if batch else []
    shapes = [[*front, m, k], [*front, k, n]]
    name = changes.pop("op", "aten::bmm" if batch else "aten::mm")
    args = {"shapes": shapes, "dtypes": [dtype, dtype], "values": ["", ""]}
    return RecordedOp(
        name, us, changes.pop("kernel", "nvjet_tst_128x256_TNN"), args=args, **changes
    )


def tensors(*shapes: list[int], dtype: str = FP32, **more: Any) -> dict[str, Any]:
    """Arguments that are all tensors of one dtype, in order."""
    return {"shapes": list(shapes), "dtypes": [dtype] * len(shapes), **more}


def gpu_case(
    done: list[RecordedOp], run: Any = None, card: Any = H200, extra: Any = (), until_us: int = 0
) -> Case:
    """One step in which the host launches all this as fast as it can."""
    events, host, device = [], 0, 0
    for number, did in enumerate(done, 1):
        host += did.late_us * US
        events += _around(did, host, HOST_US * US)
        events.append(call("cudaLaunchKernel", host + US, US, number))
        start = max(device, host + 2 * US)
        events.append(kernel(did.kernel, start, did.us * US, number))
        host, device = host + HOST_US * US, start + did.us * US
    events.append(range_("ProfilerStep#1", 0, max(host, device, until_us * US)))
    return Case(run, analyze(trace_of([*events, *extra], properties=card)))


def cpu_case(done: list[RecordedOp], run: Any = None, extra: Any = ()) -> Case:
    """One step of operators, one after the other."""
    events, host = [], 0
    for did in done:
        host += did.late_us * US
        events += _around(did, host, did.us * US)
        host += did.us * US
    events.append(range_("ProfilerStep#1", 0, host))
    return Case(run, analyze(trace_of([*events, *extra])))


def _around(did: RecordedOp, start: int, length: int) -> list[dict[str, Any]]:
    """The operator and what stands around it, outermost first."""
    events = [range_(did.phase, start, length)]
    if did.module:
        events.append(range_(f"module:{did.module}", start, length))
    if did.line:
        events.append(python(did.line, start, length))
    if did.inside:
        events.append(op(did.inside, start, length, **did.outer))
    return [*events, op(did.op, start, length, **did.args)]


def rules(case: Case) -> list[str]:
    """Names of all rules that speak, most important first."""
    from steplab.findings import explain

    return [finding.rule for finding in explain(case)]
