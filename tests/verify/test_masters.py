"""A parameter that is the rounded copy of fp32 weights is judged by those; any other by itself."""

import pytest
import torch

from steplab.verify.budgets import errors_of
from steplab.verify.judge import judge
from steplab.verify.numerics import sketch, take_snapshot
from steplab.verify.references import compute_reference, step_without_dropout
from steplab.verify.shapes import GateShape

NARROW = "precision=bf16-weights,optimizer=one-pass"


@pytest.fixture
def references(tiny_spec):
    shape = GateShape("own", "", tiny_spec(NARROW), rate=1 / 8)
    return [compute_reference(shape, name) for name in ("fp64", "bf16-rounded", "bf16-autocast")]


def test_rounding_of_the_copy_is_no_error_of_the_update(tiny_spec, references):
    """An eighth of a step is about what bf16 rounds away from an embedding."""
    truth, *peers = references
    spec = tiny_spec(NARROW)
    step = step_without_dropout(spec)
    snapshot = take_snapshot(step, spec, 1 / 8)
    assert set(snapshot.roundoff.values()) == {2.0**-24}
    name, p = next(iter(step.model.named_parameters()))
    start = truth.groups["weights"][name]
    by_copy = float((sketch(p) - start - truth.groups["update"][name]).norm())
    errors = {error.name: error for error in errors_of("update", snapshot, peers, truth)}
    size = float(truth.groups["update"][name].norm())
    assert errors[name].value < 0.2 * by_copy / size
    assert all(check.passed for check in judge(snapshot, peers, truth, ""))


def test_a_copy_that_is_not_kept_up_is_seen(tiny_spec, references):
    truth, *peers = references
    spec = tiny_spec(NARROW)
    step = step_without_dropout(spec)
    stale = {p: p.detach().clone() for p in step.model.parameters()}
    step.optimizer.register_step_post_hook(
        lambda *_: [p.data.copy_(old) for p, old in stale.items()] and None
    )
    snapshot = take_snapshot(step, spec, 1 / 8)
    assert 2.0**-8 in snapshot.roundoff.values()
    checks = judge(snapshot, peers, truth, "")
    assert "update" in [check.name for check in checks if not check.passed]


def test_without_masters_a_parameter_is_itself(tiny_spec):
    spec = tiny_spec()
    step = step_without_dropout(spec)
    before = {name: sketch(p) for name, p in step.model.named_parameters()}
    snapshot = take_snapshot(step, spec)
    for name, p in step.model.named_parameters():
        torch.testing.assert_close(snapshot.groups["update"][name], sketch(p) - before[name])
