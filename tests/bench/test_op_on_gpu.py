"""The same cells on a GPU: events, the allocator's counters and every implementation's error."""

import pytest
import torch

from steplab.bench.op_cell import measure_cell
from steplab.bench.op_measure import BoundOp, TimingOptions, measure_memory, time_op
from steplab.bench.ops import attention, experts
from steplab.core import RunSpec

pytestmark = pytest.mark.gpu
TEMPLATE = {"device": "cuda", "steps": 6, "warmup": 1}


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "tf32"])
def test_attention(dtype):
    impls = ["triton_flash", "efficient", "math", "reference", "flash", "cudnn"]
    asked = {"batch": [2], "heads": [3], "context": [300], "head_width": [64], "dtype": [dtype]}
    asked |= {"impl": impls, "tiles": ["64x32x4x2"]}
    specs = attention.BENCH.cells(asked, RunSpec("attention", **TEMPLATE), 0.2)
    runs = [measure_cell(spec) for spec in specs]
    half_only = [] if dtype == "bf16" else ["flash", "cudnn"]
    for run in runs:
        expected = "unsupported" if run.spec.config["impl"] in half_only else "ok"
        assert run.status == expected, (run.spec.config, run.reason)
    assert {run.clock.source for run in runs if run.clock} == {"cuda events"}


def test_a_tile_that_does_not_fit_is_a_row():
    asked = {"batch": [1], "heads": [1], "context": [512], "head_width": [128], "dtype": ["fp32"]}
    asked |= {"impl": ["triton_flash"], "tiles": ["256x256x4x4"]}
    own, huge = attention.BENCH.cells(asked, RunSpec("attention", **TEMPLATE), 0.2)
    assert measure_cell(own).status == "ok"
    run = measure_cell(huge)
    assert run.status in ("unsupported", "failed") and run.reason


def test_experts():
    asked = {"tokens": [512], "width": [64], "inner": [128], "experts": [8], "top_k": [2]}
    asked |= {"activation": ["gelu", "swiglu"], "routing": ["skewed"], "dtype": ["bf16"]}
    asked |= {"impl": ["loop", "grouped"]}
    for spec in experts.BENCH.cells(asked, RunSpec("experts", **TEMPLATE), 0.2):
        run = measure_cell(spec)
        assert run.status == "ok", (spec.config, run.reason)


def test_memory_and_samples_of_a_known_op():
    """exp keeps its output of 256 MiB; its gradient is one more."""
    x = torch.zeros(2**26, device="cuda", requires_grad=True)
    call = BoundOp(lambda: x.exp(), {"x": x}, torch.ones_like(x))
    clock = time_op(call, TimingOptions(8, 2, 1.0))
    assert clock.source == "cuda events"
    assert len(clock.step) == len(clock.host) == len(clock.phases["backward"]) == 8
    memory = measure_memory(call)
    assert memory.peak - memory.before == 2 * 2**28
