import pytest

from steplab.core import PLAIN, Recipe, RunSpec, fingerprint
from steplab.core.codec import decode, encode
from steplab.core.errors import UserError
from steplab.core.spec import TrainSettings, TrainSpec


def test_fingerprint_is_equal_for_equal_specs_only():
    spec = RunSpec("gpt", {"width": 8, "layers": 2})
    same = RunSpec("gpt", {"layers": 2, "width": 8})
    assert fingerprint(spec) == fingerprint(same)
    assert fingerprint(spec) != fingerprint(RunSpec("gpt", {"width": 8, "layers": 3}))


def test_spec_goes_through_json():
    spec = RunSpec("gpt", {"width": 8}, recipe=Recipe({"precision": {"dtype": "bf16"}}))
    assert decode(RunSpec, encode(spec)) == spec


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 0},
        {"steps": 0},
        {"warmup": -1},
        {"clip": -1.0},
        {"clip": float("nan")},
        {"peak_tflops": 0.0},
        {"ranks": 0},
        {"ranks": 10**6},
        {"backend": "mpi"},
    ],
)
def test_impossible_numbers_are_refused(changes):
    with pytest.raises(UserError):
        RunSpec("gpt", **changes)


@pytest.mark.parametrize(("ranks", "accumulate"), [(0, 1), (10**6, 1), (2**14, 2**10)])
def test_a_training_has_ranks_and_micro_batches_that_can_be_started(ranks, accumulate):
    with pytest.raises(UserError, match=r"ranks must be|micro_batches must be at most 1,048,576"):
        TrainSpec("tsmoe", {}, settings=TrainSettings(accumulate=accumulate), ranks=ranks)


def test_a_title_names_several_ranks():
    assert RunSpec("gpt", size="tiny").title == "gpt tiny, batch 4, full"
    assert RunSpec("gpt", size="tiny", ranks=2).title == "gpt tiny, batch 4, full, 2 ranks"
    parts = RunSpec("gpt", size="tiny", accumulate=3)
    assert parts.title == "gpt tiny, batch 4, 3 micro-batches, full"


def test_labels():
    assert PLAIN.label == "plain"
    recipe = Recipe(
        {"precision": {"dtype": "bf16"}, "compile": {"scope": "whole", "mode": "default"}}
    )
    assert recipe.label == "compile=whole,compile.mode=default,precision=bf16"
    assert Recipe({"impl": {"attention": "flash"}}).label == "impl.attention=flash"
