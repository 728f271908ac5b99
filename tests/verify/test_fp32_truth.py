"""Where fp64 cannot be had, fp32 at the highest precision is the truth, and named as such."""

from dataclasses import replace

import pytest

from steplab.core import RunSpec
from steplab.core.errors import MeasurementError
from steplab.core.ladder import Ladder
from steplab.techniques.recipes import parse_recipe
from steplab.tune.report import impact_table
from steplab.verify.candidate import Candidate
from steplab.verify.choice import choose_shapes
from steplab.verify.numerics import load_references
from steplab.verify.references import make_references
from steplab.verify.shapes import FP32_TRUTH, forms_of_truth, in_fp32, shapes_to_try
from tests.compare.sides import ENVIRONMENT
from tests.own_models import named
from tests.verify.planted import PLANTED, every_other_update, plant
from tests.verify.test_smaller_steps import LocalReferences

# A graph network: sparse products have no dense operator that could be computed beside them, and
# its author checks that everything is fp32.
GRAPH_NET = """
import torch, steplab
from torch import nn

class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x_ND):
        assert x_ND.dtype == torch.float32, "edges are fp32"
        steps = torch.arange(x_ND.shape[0])
        edges = torch.stack([steps, steps.roll(1)])
        half = torch.full((len(steps),), 0.5)
        near = torch.sparse_coo_tensor(edges, half, check_invariants=False)
        h = torch.tanh(self.first(x_ND + torch.sparse.mm(near, x_ND)))
        return self.second(h + torch.sparse.mm(near, h))

def make():
    def batches(size):
        source = torch.Generator().manual_seed(0)
        while True:
            yield torch.randn(8 * size, 16, generator=source)

    return steplab.UserModel(
        GraphNet(), batches, lambda m, x: (m(x) - x[:, :4]).square().mean(),
        optimizer=lambda m, **how: torch.optim.AdamW(m.parameters(), lr=1e-3, **how),
    )
"""


@pytest.fixture
def graph_net(tmp_path):
    """Return a function from a recipe to a spec of the graph network."""
    (tmp_path / "own.py").write_text(GRAPH_NET)

    def make(recipe="plain"):
        chosen = parse_recipe(recipe) if isinstance(recipe, str) else recipe
        word = named(f"{tmp_path / 'own.py'}:make")
        return RunSpec(word, {}, batch=4, steps=2, warmup=1, recipe=chosen, mode="full")

    return make


def chosen(spec, folder):
    said = []
    shapes = choose_shapes(
        LocalReferences(folder), spec, None, 60.0, lambda text: None, said.append
    )
    return shapes, said


def opened(spec, shapes, folder):
    return Candidate(spec, tuple(shapes), folder).open(lambda text: None)


def test_a_model_without_any_fp64_is_judged_by_fp32(graph_net, tmp_path):
    (shape,), said = chosen(graph_net(), tmp_path)
    assert shape.narrow and FP32_TRUTH in shape.words
    assert "own.py:11" in said[0] and "own.py:15" in said[0], "both refusals, with their lines"
    assert "fp32 at the highest precision is the truth" in said[0]
    assert make_references(shape, "fp32", tmp_path) == ""
    truth, *peers = load_references(tmp_path, shape.name, "fp32")
    assert not truth.exact and all(peer.exact for peer in peers)
    for recipe in ("optimizer=foreach", "optimizer=fused"):
        found = opened(graph_net(recipe), (shape,), tmp_path)
        assert found.run.status == "ok", found.run.reason
        wrong = [check for check in found.checks if not check.passed]
        assert not wrong and all(FP32_TRUTH in check.name for check in found.checks), wrong


def test_rounded_products_are_judged_by_it_too(tiny_spec, tmp_path):
    spec = tiny_spec("precision=bf16", mode="full")
    shape = in_fp32(shapes_to_try(spec)[0])
    for dtype in ("fp64", "bf16"):
        assert make_references(shape, dtype, tmp_path) == ""
    found = opened(spec, (shape,), tmp_path)
    assert found.checks and all(check.passed for check in found.checks), found.checks


def test_a_lie_is_as_red_as_with_fp64(graph_net, tmp_path, monkeypatch):
    (shape,), _ = chosen(graph_net(), tmp_path)
    assert make_references(shape, "fp32", tmp_path) == ""
    plant(monkeypatch, every_other_update)
    found = opened(replace(graph_net(), recipe=PLANTED), (shape,), tmp_path)
    wrong = [check for check in found.checks if not check.passed]
    assert wrong and any("too far from fp32" in check.detail for check in wrong)


def test_the_budget_is_a_few_times_what_shaken_peers_differ_by(graph_net, tmp_path):
    """Both sides of a comparison are fp32's: 2 + 1 times the peers' distance for all together."""
    from steplab.verify.budgets import WHOLE, Truth, errors_of

    (shape,), _ = chosen(graph_net(), tmp_path)
    make_references(shape, "fp32", tmp_path)
    truth, *peers = load_references(tmp_path, shape.name, "fp32")
    (whole,) = (e for e in errors_of("gradients", peers[-1], peers, truth) if e.name == WHOLE)
    far = max(Truth("gradients", truth, "fp32").errors(peer)[WHOLE] for peer in peers)
    assert whole.value == 0.0 and 3 * far <= whole.budget <= 3 * far + 1e-5
    assert far < 1e-5, "sixteen roundings of each weight"


def test_the_table_names_the_truth(graph_net):
    spec = graph_net()
    words = [
        form.words or "at the step's own shape" for form in forms_of_truth(shapes_to_try(spec)[0])
    ]
    notes = [impact_table(Ladder("one", spec, ENVIRONMENT, gate_shapes=(w,))).note for w in words]
    assert ["numerics against fp32" in note for note in notes] == [False, False, True]
    assert "numerics against fp64 at the step's own shape" in notes[0]


def test_what_does_not_fit_is_not_taken_for_a_refusal(graph_net):
    class Full(LocalReferences):
        def reference(self, shape, dtype, timeout):
            return "fp64 does not fit"

    with pytest.raises(MeasurementError, match=r"Nothing could be verified.*does not fit"):
        choose_shapes(Full(None), graph_net(), None, 60.0, print, print)
