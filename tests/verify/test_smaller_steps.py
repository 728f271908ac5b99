"""Where full steps are chaos the gate takes smaller ones, and tells right from wrong again."""

from dataclasses import replace

import pytest
import torch

from steplab.core import RunSpec
from steplab.techniques.recipes import parse_recipe
from steplab.tune.folder import LadderFolder
from steplab.tune.progress import NullView
from steplab.tune.search import find_shapes
from steplab.verify.candidate import Candidate
from steplab.verify.numerics import STEPS, take_snapshot
from steplab.verify.references import make_references, step_without_dropout, why_undecided
from steplab.verify.remote import ReferenceWorker
from steplab.verify.shapes import (
    SMALLER_RATE,
    TRUTH,
    dtype_of,
    rounding_name,
    shapes_to_try,
    with_batch,
    with_smaller_steps,
    without_dropout,
)
from tests.own_models import named
from tests.verify.planted import PLANTED, every_other_update, plant

DEEP = """
import torch, steplab
from torch import nn

def deep(rate: float = 0.1, plain: bool = False):
    layers = [m for _ in range(10) for m in (nn.Linear(48, 48), nn.Tanh())]
    rule = torch.optim.SGD if plain else torch.optim.AdamW

    def batches(size):
        while True:
            yield torch.randn(size, 48)

    return steplab.UserModel(
        nn.Sequential(*layers), batches, lambda m, x: (m(x) - x.roll(1, 1)).square().mean(),
        optimizer=lambda m, **how: rule(m.parameters(), lr=rate, **how),
    )
"""


@pytest.fixture
def deep(tmp_path):
    """Ten layers of tanh whose updates at a rate of 0.1 are chaos, as a spec."""
    (tmp_path / "own.py").write_text(DEEP)

    def make(recipe="plain", **config):
        full = {"rate": 0.1, "plain": False, **config}
        fields = {"batch": 16, "steps": 2, "warmup": 1, "recipe": parse_recipe(recipe)}
        return RunSpec(named(f"{tmp_path / 'own.py'}:deep"), full, **fields)

    return make


class LocalReferences:
    """The references in this process."""

    def __init__(self, references):
        self.references = references

    def reference(self, shape, dtype, timeout):
        return make_references(shape, dtype, self.references)

    def why_undecided(self, shape, dtype, timeout):
        return why_undecided(shape, dtype, self.references)

    def has_dropout(self, spec, timeout):
        return False


class Listening(NullView):
    """Keeps what is said."""

    def __init__(self):
        self.lines = []

    def say(self, text):
        self.lines.append(text)


def found(spec, folder, also_batch=None, view=None):
    ladder, references = LadderFolder(folder), LocalReferences(folder / "references")
    return find_shapes(references, spec, also_batch, ladder, 60, view or NullView()), ladder


def test_full_steps_where_they_tell(deep, tmp_path):
    (shape,), _ = found(deep(rate=0.01), tmp_path / "ladder")
    assert shape.rate == 1 and not shape.words


def test_smaller_ones_where_they_do_not(deep, tmp_path):
    (shape,), ladder = found(deep(), tmp_path / "ladder")
    assert shape.rate == SMALLER_RATE and shape.words == "at 1/8 of the learning rate"
    assert why_undecided(replace(shape, name="own"), "fp32", ladder.references)
    assert not why_undecided(shape, "fp32", ladder.references)
    assert ladder.load_shapes(shape.spec) == [shape]


def test_an_honest_step_passes_and_a_wrong_one_does_not(deep, tmp_path, monkeypatch):
    (shape,), ladder = found(deep(), tmp_path / "ladder")
    opened = Candidate(deep("optimizer=foreach"), [shape], ladder.references).open(print)
    assert opened.run.status == "ok" and opened.run.clock is not None, opened.run.reason
    assert all(check.passed for check in opened.checks)
    plant(monkeypatch, every_other_update)
    wrong = Candidate(replace(deep(), recipe=PLANTED), [shape], ladder.references).open(print)
    assert wrong.run.clock is None
    red = [check.name for check in wrong.checks if not check.passed]
    assert "update at 1/8 of the learning rate" in red


@pytest.mark.slow
def test_every_shape_is_asked(deep, tmp_path, monkeypatch):
    """In fp32 two sequences tell where 64 do not."""
    monkeypatch.setattr("steplab.verify.choice.LIKELY_DTYPES", ("fp32",))
    spec = replace(deep(rate=0.05), batch=2)
    (alone,), _ = found(spec, tmp_path / "alone")
    both, _ = found(spec, tmp_path / "both", also_batch=64)
    assert alone.rate == 1 and [shape.rate for shape in both] == [SMALLER_RATE, SMALLER_RATE]
    assert both[1].words == "at batch 64, at 1/8 of the learning rate"


@pytest.mark.slow
def test_where_smaller_steps_do_not_help_the_full_ones_stay(deep, tmp_path, monkeypatch):
    monkeypatch.setattr("steplab.verify.numerics.scale_learning_rates", lambda step, rate: None)
    told = Listening()
    (shape,), _ = found(deep(), tmp_path / "ladder", view=told)
    assert shape.rate == 1 and all(line.endswith("also after smaller steps") for line in told.lines)


@pytest.mark.parametrize("kind", ["number", "tensor", "shared tensor"])
def test_the_rate_is_multiplied_once(deep, kind):
    """Plain descent moves by the rate times the sum of gradients, almost the same ones here."""
    moved, shared = [], torch.tensor(1e-6, dtype=torch.float64)
    for rate in (1.0, 0.5):
        step = step_without_dropout(deep(rate=1e-6, plain=True))
        groups = step.optimizer.param_groups
        half = {**groups[0], "params": groups[0]["params"][10:]}
        groups[:] = [{**groups[0], "params": groups[0]["params"][:10]}, half]
        for group in groups if kind != "number" else ():
            group["lr"] = shared if kind == "shared tensor" else shared.clone()
        step.model.double()
        snapshot = take_snapshot(step, deep(), rate, doubled=True)
        assert len(snapshot.groups["loss"]) == STEPS
        moved.append(torch.cat(list(snapshot.groups["update"].values())))
    torch.testing.assert_close(moved[1], moved[0] / 2, rtol=1e-3, atol=1e-12)


def test_a_shape_keeps_its_rate_and_all_its_words(deep):
    own, single = shapes_to_try(deep())
    both = with_smaller_steps(without_dropout(single))
    assert both.words == "at batch 1, without random draws, at 1/8 of the learning rate"
    assert with_batch(with_smaller_steps(own), 3).rate == SMALLER_RATE
    assert len({shape.name for shape in (own, single, with_smaller_steps(own), both)}) == 4
    smallest = with_smaller_steps(both)
    assert smallest.words == "at batch 1, without random draws, at 1/64 of the learning rate"
    assert smallest.rate == SMALLER_RATE**2 and smallest.name != both.name


@pytest.mark.parametrize("state", ["", "adam-8bit"])
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])
def test_the_dtype_of_a_rounding_is_known_by_its_bits(dtype, narrow, state):
    assert dtype_of(rounding_name(dtype, narrow, state)) == dtype


class Undecided(ReferenceWorker):
    """Starts no process; right and wrong differ from a `rate` down."""

    def __init__(self, rounding, rate):
        self.rounding, self.rate, self.asked, self.made = rounding, rate, [], []

    def dry_run(self, spec, shape, timeout):
        return self.rounding, None

    def reference(self, shape, dtype, timeout):
        self.made.append((shape.name, dtype))
        return ""

    def why_undecided(self, shape, dtype, timeout):
        assert (shape.name, dtype) in self.made and (shape.name, TRUTH) in self.made
        self.asked.append(shape.rate)
        return "" if shape.rate <= self.rate else "would pass whatever it held"


@pytest.mark.parametrize(
    ("rounding", "rate", "chosen", "asked"),
    [
        ("fp8", 1.0, 1.0, [1.0]),
        ("fp8", 1 / 64, 1 / 64, [1.0, 1 / 8, 1 / 64]),
        ("fp8", 0.0, 1.0, [1.0, 1 / 8, 1 / 64]),  # the gate will say so at the step's own rate
        ("bf16", 1 / 64, 1.0, []),  # has been asked when the shapes were chosen
    ],
)
def test_a_recipe_that_rounds_more_gets_smaller_steps_of_its_own(
    deep, rounding, rate, chosen, asked
):
    references = Undecided(rounding, rate)
    spec = replace(deep(), mode="full")
    shapes, problem = references.prepare(spec, shapes_to_try(spec)[:1], 1.0, lambda text: None)
    assert not problem and [shape.rate for shape in shapes] == [chosen]
    assert references.asked == asked
