"""Sparse gradients pass the gate as the numbers that they stand for."""

import pytest

from steplab.core import RunSpec
from steplab.core.errors import MeasurementError
from steplab.techniques.recipes import parse_recipe
from steplab.verify.candidate import Candidate
from steplab.verify.choice import choose_shapes
from steplab.verify.references import make_references
from tests.own_models import named
from tests.verify.planted import PLANTED, every_other_update, plant
from tests.verify.test_smaller_steps import LocalReferences

BAGS = """
import torch, steplab
from torch import nn

class Bags(nn.Module):
    def __init__(self, refuses):
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(200, 16, sparse=True, mode="sum"), nn.Linear(16, 5)
        self.refuses = refuses

    def forward(self, ids):
        found = self.bags(ids)
        assert not self.refuses or found.dtype == torch.float32, "only fp32"
        return self.head(found)

def make(refuses: bool = False):
    def batches(size):
        source = torch.Generator().manual_seed(0)
        while True:
            ids = torch.randint(0, 200, (size, 8), generator=source)
            yield ids, torch.randint(0, 5, (size,), generator=source)

    return steplab.UserModel(
        Bags(refuses), batches, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]),
        optimizer=lambda m, **how: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, **how),
    )
"""


@pytest.fixture
def bags(tmp_path):
    """Return a function to a spec of a model whose gradients and momentum are sparse."""
    (tmp_path / "own.py").write_text(BAGS)

    def make(refuses=False, recipe="plain"):
        chosen = parse_recipe(recipe) if isinstance(recipe, str) else recipe
        word, config = named(f"{tmp_path / 'own.py'}:make"), {"refuses": refuses}
        return RunSpec(word, config, batch=4, steps=2, warmup=1, recipe=chosen, mode="full")

    return make


def opened(spec, folder):
    """Return the shape, what was said of it, and the candidate after the gate."""
    said = []
    references = LocalReferences(folder)
    (shape,) = choose_shapes(references, spec, None, 60.0, lambda text: None, said.append)
    for dtype in ("fp32", "bf16"):
        assert make_references(shape, dtype, folder) == ""
    return shape, said, Candidate(spec, (shape,), folder).open(lambda text: None)


@pytest.mark.parametrize("recipe", ["optimizer=foreach", "precision=bf16"])
def test_the_truth_is_fp64_and_an_honest_step_is_green(bags, tmp_path, recipe):
    shape, said, found = opened(bags(recipe=recipe), tmp_path)
    assert not said and not shape.widened and not shape.narrow
    assert found.run.status == "ok", found.run.reason
    names = {check.name for check in found.checks}
    assert {"gradients", "update", "optimizer momentum_buffer"} <= names
    assert all(check.passed for check in found.checks), found.checks


def test_an_update_that_is_left_out_is_red(bags, tmp_path, monkeypatch):
    plant(monkeypatch, every_other_update)
    *_, found = opened(bags(recipe=PLANTED), tmp_path)
    assert "update" in {check.name for check in found.checks if not check.passed}


def test_a_model_that_refuses_fp64_too_is_judged_by_fp32(bags, tmp_path):
    shape, (said,), found = opened(bags(refuses=True), tmp_path)
    assert shape.narrow and "only fp32" in said and "layout torch.sparse_coo" in said
    assert found.checks and all(check.passed for check in found.checks), found.checks


def test_what_fp32_refuses_is_told_as_that_with_a_remedy_that_helps(bags, tmp_path, monkeypatch):
    def broken(*given, **how):
        raise RuntimeError("no such thing")

    monkeypatch.setattr("steplab.verify.references.take_snapshot", broken)
    with pytest.raises(MeasurementError) as caught:
        opened(bags(), tmp_path)
    said = str(caught.value)
    assert "as the truth: the model does not run in fp32: RuntimeError: no such thing" in said
    assert "Let the model run in fp64." in said and "--batch" not in said
