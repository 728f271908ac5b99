"""A sketch stands for a tensor when distances are asked for; snapshots of them go through files."""

import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from steplab.core import RunSpec
from steplab.core.errors import UserError
from steplab.step.assemble import assemble
from steplab.step.graph import graph_step
from steplab.verify.numerics import (
    SKETCH_SIZE,
    NumericsSnapshot,
    distance,
    load_snapshot,
    save_snapshot,
    sketch,
    take_snapshot,
)
from steplab.verify.shapes import GateShape
from tests.own_models import named
from tests.step.tape_graphs import TapeGraphs
from tests.verify.planted import verdicts


def test_small_tensors_are_kept_whole_and_are_copies():
    x = torch.randn(7, 9, dtype=torch.float64)
    kept = sketch(x)
    torch.testing.assert_close(kept, x.flatten())
    x += 1
    assert distance(kept, sketch(x)) == pytest.approx(math.sqrt(63))


@pytest.mark.parametrize("shape", [(SKETCH_SIZE + 1,), (300, 500)])
def test_the_norm_of_a_difference_is_estimated(shape):
    source = torch.Generator().manual_seed(0)
    a = torch.randn(shape, generator=source)
    b = a + 1e-4 * torch.randn(shape, generator=source)
    true = float((a.double() - b.double()).norm())
    # 1.1 % deviation for noise; five of them.
    assert distance(sketch(a), sketch(b)) == pytest.approx(true, rel=0.055)


def test_one_wrong_element_is_seen_exactly():
    a = torch.zeros(100_000)
    b = a.clone()
    b[77_777] = 3.0
    assert distance(sketch(a), sketch(b)) == pytest.approx(3.0)


def test_complex_numbers_keep_both_parts():
    x = torch.tensor([1 + 2j, 3 - 4j])
    torch.testing.assert_close(sketch(x), torch.tensor([1.0, 2.0, 3.0, -4.0], dtype=torch.float64))


def test_what_is_not_finite_is_infinitely_far():
    assert distance(sketch(torch.tensor([1.0, math.nan])), sketch(torch.zeros(2))) == math.inf
    assert distance(torch.zeros(2), torch.zeros(3)) == math.inf


def test_a_snapshot_travels_through_its_file(tmp_path):
    """Names may hold slashes and dots; two tensors may share memory."""
    whole = torch.arange(6.0, dtype=torch.float64)
    groups = {"weights": {"a/b.weight": whole[:3], "": whole}, "loss": {"step 0": whole[0]}}
    snapshot = NumericsSnapshot(groups, {"a/b.weight": 2.0**-24}, "bf16", 7, 0.25)
    save_snapshot(snapshot, tmp_path / "own-fp64.safetensors")
    again = load_snapshot(tmp_path / "own-fp64.safetensors")
    assert replace(again, groups={}) == replace(snapshot, groups={})
    assert {group: set(members) for group, members in again.groups.items()} == {
        "weights": {"a/b.weight", ""},
        "loss": {"step 0"},
    }
    for group, members in groups.items():
        for name, tensor in members.items():
            assert torch.equal(again.groups[group][name], tensor)


@pytest.mark.parametrize("kind", ["missing", "pickle", "cut", "without fields"])
def test_a_file_that_is_no_snapshot_is_refused(tmp_path, kind):
    """References lie in the folder of a ladder, which may have come from somebody else."""
    path = tmp_path / "own-fp64.safetensors"
    if kind == "pickle":
        torch.save({"groups": {}}, path)
    elif kind != "missing":
        save_file({"a/b": torch.ones(2)}, path)
        if kind == "cut":
            path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UserError, match="is no reference of the gate"):
        load_snapshot(path)


@pytest.mark.parametrize("name", ["../own", "/tmp/own", "a/b", "", "own\x1b"])
def test_a_shape_is_named_by_a_plain_word(name, tiny_spec):
    """Its name is part of a file's name, and gate.json may have come from somebody else."""
    with pytest.raises(UserError, match="is no name of a shape"):
        GateShape(name, "", tiny_spec())


WITHOUT_TENSORS = """
import torch, steplab
from torch import nn

def make():
    def batches(size):
        while True:
            yield torch.randn(size, 8)

    def predict(model, x):
        return model(x).argmax(-1).tolist()

    return steplab.UserModel(nn.Linear(8, 4), batches, lambda m, x: m(x).mean(), predict=predict)
"""


def test_predictions_without_a_tensor_verify_nothing(tmp_path):
    (tmp_path / "own.py").write_text(WITHOUT_TENSORS)
    spec = RunSpec(named(f"{tmp_path / 'own.py'}:make"), {}, mode="infer")
    found = verdicts(spec)
    nothing = "unverified: nothing that the model predicts is a tensor"
    assert found == {"outputs": (False, nothing)}
    assert all(passed for passed, _ in verdicts(replace(spec, mode="full")).values())


def test_predictions_are_those_of_the_graph_that_is_replayed(tiny_spec):
    """Python runs in the first four of eight steps only."""
    spec = tiny_spec(mode="infer")
    plain, step = take_snapshot(assemble(spec), spec), assemble(spec)
    step.parts.graph_warmup = 3
    graph_step(step, TapeGraphs)
    forward, calls = step.forward, []

    def counted(*inputs):
        calls.append(1)
        return forward(*inputs)

    step.forward = counted
    found = take_snapshot(step, spec)
    assert len(calls) == 4 and step.forward is counted
    assert set(found.groups["outputs"]) == {f"prediction 0 in step {n}" for n in range(8)}
    for name, seen in found.groups["outputs"].items():
        assert torch.equal(seen, plain.groups["outputs"][name]), name
