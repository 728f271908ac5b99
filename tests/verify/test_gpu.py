"""What only a GPU can show: waits are found, and every check works on device tensors."""

from dataclasses import replace

import pytest
import torch

from steplab.core import RunSpec
from steplab.techniques.recipes import parse_recipe
from steplab.verify.candidate import Candidate
from steplab.verify.checks import run_checks
from steplab.verify.references import make_references
from steplab.verify.shapes import shapes_to_try
from steplab.workloads.workload import find_workload
from tests.verify.planted import PLANTED, plant, wrong_scaling

pytestmark = pytest.mark.gpu

RECIPES = [
    "precision=bf16",
    "precision=bf16,optimizer=fused",
    "precision=bf16,compile=blocks",
    "precision=bf16,cuda_graph=step",
]
# In fp32 the grouped products read their offsets on the host: the model itself waits there.
WAITING = ["plain", "precision=tf32", "optimizer=fused"]


def tsmoe(recipe) -> RunSpec:
    entry = find_workload("tsmoe")
    config = entry.resolve("tiny", {})
    return RunSpec("tsmoe", config, "tiny", batch=8, device="cuda", recipe=parse_recipe(recipe))


def opened(spec, folder):
    shape = shapes_to_try(spec)[0]
    for dtype in ("fp64", "fp32", "tf32", "bf16"):
        assert make_references(shape, dtype, folder) == ""
    return Candidate(spec, [shape], folder).open(lambda text: None)


def red(seen, allowed):
    """Return the checks that have not passed, with their details."""
    assert seen.run.status == "ok", seen.run.reason
    checks = [*seen.checks, *run_checks(seen.run, seen.waits, allowed, None)]
    return {check.name: check.detail for check in checks if not check.passed}


@pytest.mark.parametrize("recipe", RECIPES)
def test_honest_recipes_pass_on_the_device(recipe, tmp_path):
    seen = opened(tsmoe(recipe), tmp_path)
    assert red(seen, ()) == {} and seen.waits == ()


def test_only_waits_that_were_not_there_before_are_red(tmp_path):
    """What leaves the model's own waits as they are is green; what adds some is not."""
    before = opened(tsmoe("plain"), tmp_path).waits
    assert before and all("grouped_mm/loop.py" in line for line in before)
    for recipe in WAITING:
        seen = opened(tsmoe(recipe), tmp_path)
        assert not red(seen, before), recipe
    worse = opened(tsmoe("precision=bf16,impl.experts=loop"), tmp_path)
    assert any("experts/loop.py" in line for line in worse.waits)
    assert list(red(worse, ())) == ["no synchronization"]


def test_a_step_that_waits_cannot_be_captured(tmp_path):
    seen = opened(tsmoe("cuda_graph=step"), tmp_path)
    assert seen.run.status == "unsupported" and "waits for the device" in seen.run.reason


def test_a_wrong_kernel_is_stopped(tmp_path, monkeypatch):
    plant(monkeypatch, wrong_scaling)
    seen = opened(replace(tsmoe("plain"), recipe=PLANTED), tmp_path)
    assert seen.run.clock is None


def test_work_put_off_beyond_the_clock_is_seen(tmp_path, monkeypatch):
    """A technique that queues work on a stream which nobody waits for: its update comes late."""

    def late(parts):
        side = torch.cuda.Stream()

        def wrap(step):
            def elsewhere(*args):
                with torch.cuda.stream(side):
                    torch.cuda._sleep(50_000_000)
                    return step(*args)

            return elsewhere

        parts.wrap_optimizer_step = wrap

    plant(monkeypatch, late)
    seen = opened(replace(tsmoe("plain"), recipe=PLANTED), tmp_path)
    assert seen.run.clock is None or red(seen, seen.waits)
