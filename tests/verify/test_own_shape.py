"""Where fp64 fits only at a smaller shape, the step that is measured is compared with fp32."""

from dataclasses import replace

import pytest

from steplab.core.ladder import Ladder
from steplab.techniques.recipes import parse_recipe
from steplab.tune.report import impact_table
from steplab.verify.candidate import Candidate
from steplab.verify.choice import choose_shapes
from steplab.verify.references import make_references
from steplab.verify.remote import ReferenceWorker
from steplab.verify.shapes import FP32_TRUTH, TRUTH
from tests.compare.sides import ENVIRONMENT
from tests.verify.planted import PLANTED, plant
from tests.verify.test_smaller_steps import LocalReferences

OWN = 4  # sequences of the step that is measured


class Small(LocalReferences):
    """A machine on which fp64 fits only at batch 1."""

    def __init__(self, folder, too_large=(TRUTH,)):
        super().__init__(folder)
        self.too_large = too_large

    def reference(self, shape, dtype, timeout):
        is_fp64 = dtype == TRUTH and not shape.narrow
        if shape.spec.batch > 1 and dtype in self.too_large and (is_fp64 or dtype != TRUTH):
            return f"{dtype} does not fit"
        return super().reference(shape, dtype, timeout)


def chosen(references, spec):
    said = []
    shapes = choose_shapes(references, spec, None, 60.0, lambda text: None, said.append)
    return shapes, said


def lost_where_large(parts):
    """Drop one gradient, as a compiler did whose kernels for large tensors were wrong."""
    sizes = [0]
    parts.model.register_forward_pre_hook(lambda model, args: sizes.append(len(args[0])))
    weight = next(p for p in parts.model.parameters() if p.dim() == 1)
    weight.register_hook(lambda gradient: gradient * (sizes[-1] < OWN))


@pytest.fixture
def spec(tiny_spec):
    return tiny_spec("plain", mode="full", batch=OWN)


def test_a_smaller_shape_has_the_own_one_beside_it(spec, tmp_path):
    (single, own), said = chosen(Small(tmp_path), spec)
    assert single.words == "at batch 1" and not single.extra
    assert own.extra and own.narrow and own.spec == replace(spec, batch=OWN)
    assert own.words == f"at the step's own shape, {FP32_TRUTH}"
    assert said == ["fp64 fits only at batch 1: at the step's own shape fp32 is the truth"]
    note = impact_table(
        Ladder("one", spec, ENVIRONMENT, gate_shapes=(single.words, own.words))
    ).note
    assert f"numerics against fp64 at batch 1; {own.words}" in note


def test_where_fp64_fits_there_is_one(spec, tmp_path):
    (shape,), said = chosen(LocalReferences(tmp_path), spec)
    assert not shape.words and not said


def test_where_not_even_fp32_fits_it_is_said(spec, tmp_path):
    (shape,), said = chosen(Small(tmp_path, (TRUTH, "fp32")), spec)
    assert shape.words == "at batch 1"
    assert said == ["compared at batch 1 only: at the step's own shape fp32 does not fit"]


def test_a_recipe_without_references_there_is_judged_at_the_smaller_one(spec, tmp_path):
    (single, own), _ = chosen(Small(tmp_path), spec)

    class Worker(ReferenceWorker):
        def __init__(self):
            self.small = Small(tmp_path, (TRUTH, "bf16"))

        def reference(self, shape, dtype, timeout):
            return self.small.reference(shape, dtype, timeout)

        def why_undecided(self, shape, dtype, timeout):
            return self.small.why_undecided(shape, dtype, timeout)

        def dry_run(self, spec, shape, timeout):
            return "bf16" if "precision" in spec.recipe.techniques else "fp32", None

    narrow = replace(spec, recipe=parse_recipe("precision=bf16"))
    assert Worker().prepare(spec, (single, own), 60.0, print) == ((single, own), None)
    shapes, problem = Worker().prepare(narrow, (single, own), 60.0, print)
    assert problem is None and shapes == (single, replace(own, left_out="bf16 does not fit"))
    make_references(single, "bf16", tmp_path)
    found = Candidate(narrow, shapes, tmp_path).open(print)
    assert found.run.clock is not None and all(check.passed for check in found.checks)
    left_out = [c.detail for c in found.checks if "the step's own shape" in c.name]
    assert left_out == ["not compared: bf16 does not fit"]


def test_what_is_wrong_only_at_the_own_shape_is_red(spec, tmp_path, monkeypatch):
    shapes, _ = chosen(Small(tmp_path), spec)
    for shape in shapes:
        assert make_references(shape, "fp32", tmp_path) == ""
    honest = Candidate(spec, tuple(shapes), tmp_path).open(print)
    assert honest.run.clock is not None and all(check.passed for check in honest.checks)
    plant(monkeypatch, lost_where_large)
    wrong = replace(spec, recipe=PLANTED)
    assert all(c.passed for c in Candidate(wrong, tuple(shapes[:1]), tmp_path).open(print).checks)
    found = Candidate(wrong, tuple(shapes), tmp_path).open(print)
    red = [check for check in found.checks if not check.passed]
    assert found.run.clock is None and all("the step's own shape" in check.name for check in red)
    assert any("gradients" in check.name for check in red)
