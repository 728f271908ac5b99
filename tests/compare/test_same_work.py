from dataclasses import replace

import pytest

from steplab.compare.same_work import condition_diff, work_differences
from steplab.core import Accelerator, Compilation, Ran, Work
from tests.compare.sides import ENVIRONMENT, run_of


def test_another_recipe_device_or_seed_is_the_same_work():
    other = run_of(recipe={"precision": {"dtype": "bf16"}}, device="cuda", seed=1, steps=99)
    assert work_differences(run_of(), other) == ()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"batch": 8}, "batch 4 and 8"),
        ({"mode": "forward"}, "mode full and forward"),
        ({"accumulate": 2}, "accumulate 1 and 2"),
        ({"workload": "tsmoe"}, "workload gpt and tsmoe"),
        ({"config": {"context": 256}}, "context 128 and 256"),
        ({"config": {"experts": 4}}, "experts None and 4"),
    ],
)
def test_other_work_is_told_apart(changes, word):
    other = run_of(**changes)
    if "experts" in word:
        other = replace(other, parameters=2000)
    assert work_differences(run_of(), other) == (word,)


def test_a_setting_that_changes_no_size_is_the_same_work():
    fused = run_of(config={"fused_projections": True})
    assert work_differences(run_of(), fused) == ()
    unknown = replace(fused, work=Work(512, None, None, None))
    assert work_differences(run_of(), unknown) == ("fused_projections None and True",)
    assert work_differences(run_of(), replace(fused, work=None)) != ()


def test_two_files_of_the_users_own():
    a, b = run_of(workload="mine.py:slow"), run_of(workload="mine.py:fast")
    assert work_differences(a, b) == ()
    assert work_differences(a, replace(b, parameters=2000)) == (
        "workload mine.py:slow and mine.py:fast",
    )
    assert work_differences(a, run_of()) == ("workload mine.py:slow and gpt",)


def rows(a, b):
    return {(row[0], row[1]): row[2:] for row in condition_diff(a, b).rows}


def test_equal_runs_differ_in_nothing():
    assert condition_diff(run_of(), run_of(noise := (9.0,) * 5)) is None and noise


def test_every_field_is_named():
    card = Accelerator("NVIDIA H200", 2**37, power_limit_w=700.0)
    environment = replace(
        ENVIRONMENT, torch="2.14", accelerators=(card,), variables={"OMP_NUM_THREADS": "1"}
    )
    other = run_of(
        recipe={"precision": {"dtype": "bf16"}},
        config={"fused": True},
        environment=environment,
        device="cuda",
        peak_tflops=989.4,
    )
    other = replace(other, ran=Ran({"attention": ("cudnn", "math")}), compilation=Compilation(3, 0))
    found = rows(run_of(), other)
    assert found[("recipe", "precision.dtype")] == ("not set", "bf16")
    assert found[("config", "fused")] == ("not set", "true")
    assert found[("spec", "device")] == ("cpu", "cuda")
    assert found[("spec", "peak_tflops")] == ("not set", "989.4")
    assert found[("ran", "impls.attention")] == ("flash", "cudnn/math")
    assert found[("compilation", "graphs")] == ("not set", "3")
    assert found[("environment", "torch")] == ("2.13", "2.14")
    assert found[("environment", "accelerators.0.name")] == ("not set", "NVIDIA H200")
    assert found[("environment", "variables.OMP_NUM_THREADS")] == ("not set", "1")
    assert ("environment", "cpu") not in found


def test_an_empty_setting_is_one_that_is_not_set():
    table = condition_diff(run_of(config={"quantiles": ""}), run_of(config={"heads": 4}))
    assert [row[1] for row in table.rows] == ["heads"]
