"""What is not finite bounds no error: over NaN and infinity the gate is never green."""

from dataclasses import replace

import pytest
import torch

from steplab.core.errors import MeasurementError
from steplab.verify.judge import GROUPS, judge
from steplab.verify.numerics import NAN_BUFFERS, NumericsSnapshot
from steplab.verify.references import make_references
from steplab.verify.shapes import shapes_to_try
from tests.verify.planted import own_file

NAN, INF, HUGE = float("nan"), float("inf"), 1e200  # whose square overflows


def snapshot(group: str = "", value: float = 1.0) -> NumericsSnapshot:
    """Every group holds the tensors "w" and "b"; in one group "w" begins with `value`."""
    groups = {
        name: {"w": torch.tensor([value if name == group else 1.0, 2.0]).double(), "b": ONE}
        for name in GROUPS
    }
    return NumericsSnapshot({**groups, "batches": {}}, {"w": 2**-24, "b": 2**-24}, "fp32", 2)


ONE = torch.ones(3, dtype=torch.float64)


def red(
    candidate: NumericsSnapshot, peer: NumericsSnapshot, truth: NumericsSnapshot
) -> dict[str, str]:
    found = judge(candidate, [peer], truth, "")
    return {check.name: check.detail for check in found if not check.passed}


def test_what_is_finite_and_equal_passes():
    assert red(snapshot(), snapshot(), snapshot()) == {}


@pytest.mark.parametrize("value", [NAN, INF, HUGE])
@pytest.mark.parametrize("group", GROUPS)
def test_a_truth_that_is_not_finite_verifies_nothing(group, value):
    wrong = snapshot(group, value)
    assert red(wrong, wrong, wrong)[group] == "unverified: w is not finite in fp64"


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("group", GROUPS)
def test_nor_does_a_peer_and_a_candidate_is_too_far_off(group, value):
    wrong = snapshot(group, value)
    assert red(snapshot(), wrong, snapshot()) == {group: "unverified: w is not finite in the peer"}
    found = red(wrong, snapshot(), snapshot())
    assert list(found) == [group] and "too far from fp64; worst w: error inf" in found[group]


def test_a_buffer_with_nan_that_the_truth_does_not_have_is_red_and_named():
    lost = snapshot()
    lost = replace(
        lost, groups={**lost.groups, NAN_BUFFERS: {"w": torch.tensor([1.0, 0.0]).double()}}
    )
    found = red(lost, snapshot(), snapshot())
    assert list(found) == [NAN_BUFFERS] and "worst w" in found[NAN_BUFFERS]
    assert red(lost, lost, lost) == {}


@pytest.mark.parametrize("word", ["nan", "inf"])
def test_a_baseline_without_a_finite_loss_is_refused(tmp_path, word):
    spec = own_file(tmp_path, "nn.Linear(width, 1)", f"m(x).square().mean() * float('{word}')")
    shape = shapes_to_try(spec)[0]
    with pytest.raises(MeasurementError, match=rf"plain step is {word} in fp64 \(step 0\)"):
        make_references(shape, "fp64", tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
