from dataclasses import replace

import pytest

from steplab.compare.same_work import work_differences
from steplab.core import Work
from tests.compare.sides import run_of


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
