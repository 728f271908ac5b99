"""Passes over all weights, whose sizes the profiler does not record."""

from __future__ import annotations

import numpy as np
import pytest

from steplab.trace.analyze import analyze
from tests.trace.traces import call, kernel, op, range_, trace_of

H200 = {"deviceProperties": [{"id": 0, "name": "NVIDIA H200"}]}
WEIGHTS = 1_000_000
APPLY = "void at::native::multi_tensor_apply_kernel<TensorListMetadata<4>, "
ADAM = APPLY + "at::native::FusedAdamMathFunctor<float, 4, (ADAM_MODE)1, false>, double>"
NORM, NORM16 = (APPLY + f"LpNormFunctor<{t}, (NormType)1, float>>" for t in ("float", "c10::Half"))


def analysed(phase: str, kernels: list[tuple[str, int]], weights: int | None = WEIGHTS):
    events = [range_("ProfilerStep#1", 0, 1_000_000), range_(phase, 0, 900_000)]
    for i, (name, ns) in enumerate(kernels, 1):
        at = 20_000 * i
        empty = {"shapes": [[], []], "dtypes": ["TensorList", "TensorList"]}
        events += [op("aten::_fused_adamw_", at, 5_000, **empty)]
        events += [call("cudaLaunchKernel", at, 1_000, i), kernel(name, at + 2_000, ns, i)]
    return analyze(trace_of(events, properties=H200), weights=weights).work


def test_a_fused_update_moves_seven_numbers_per_weight():
    work = analysed("optimizer", [(ADAM, 9_000), (ADAM, 3_000)])
    assert work.bytes == pytest.approx([0.75 * 28 * WEIGHTS, 0.25 * 28 * WEIGHTS])
    assert work.ideal == pytest.approx([0.75 * 28e6 / 4800, 0.25 * 28e6 / 4800])


def test_an_update_that_no_operator_surrounds():
    assert analysed("optimizer", [("adamw_kernel", 9_000)]).bytes.tolist() == [28 * WEIGHTS]


def test_what_is_quicker_than_memory_has_lost_nothing():
    assert analysed("optimizer", [("adamw_kernel", 900)]).ideal.tolist() == [900]


def test_gradients_of_two_dtypes_share_the_weights():
    work = analysed("clip", [(NORM, 6_000), (NORM16, 6_000)])
    assert work.bytes == pytest.approx([4 * WEIGHTS / 2, 2 * WEIGHTS / 2])


@pytest.mark.parametrize(
    ("phase", "name", "weights"),
    [("forward", NORM, WEIGHTS), ("optimizer", ADAM, None), ("optimizer", "other", WEIGHTS)],
)
def test_everything_else_stays_unknown(phase, name, weights):
    assert np.isnan(analysed(phase, [(name, 9_000)], weights).ideal).all()
