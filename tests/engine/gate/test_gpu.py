"""What only a GPU can show: waits are found, and every check works on device tensors."""

from dataclasses import replace

import pytest
import torch

from steplab.engine.gate.candidate import Candidate
from steplab.engine.gate.checks import run_checks
from steplab.engine.gate.scout import make_references
from steplab.engine.gate.shapes import shapes_to_try
from steplab.spec import RunSpec
from steplab.techniques.parse import parse_recipe
from steplab.workloads.workload import find_workload
from tests.engine.gate.planted import PLANTED, plant, wrong_scaling

pytestmark = pytest.mark.gpu

RECIPES = [
    "plain",
    "precision=tf32",
    "precision=bf16",
    "precision=bf16,optimizer=fused",
    "precision=bf16,compile=blocks",
    "cuda_graph=step",
    "precision=bf16,cuda_graph=step",
]


def tsmoe(recipe) -> RunSpec:
    entry = find_workload("tsmoe")
    config = entry.resolve("tiny", {})
    return RunSpec("tsmoe", config, "tiny", batch=8, device="cuda", recipe=parse_recipe(recipe))


def opened(spec, folder):
    shape = shapes_to_try(spec)[0]
    for dtype in ("fp64", "fp32", "tf32", "bf16"):
        assert make_references(shape, dtype, folder) == ""
    return Candidate(spec, [shape], folder).open(lambda text: None)


@pytest.mark.parametrize("recipe", RECIPES)
def test_honest_recipes_pass_on_the_device(recipe, tmp_path):
    seen = opened(tsmoe(recipe), tmp_path)
    assert seen.run.status == "ok", seen.run.reason
    checks = [*seen.checks, *run_checks(seen.run, seen.waits, (), None)]
    assert {check.name: check.detail for check in checks if not check.passed} == {}


def test_experts_one_by_one_wait_for_the_device(tmp_path):
    seen = opened(tsmoe("impl.experts=loop"), tmp_path)
    assert seen.waits and any("loop.py" in line for line in seen.waits)
    red = [c.name for c in run_checks(seen.run, seen.waits, (), None) if not c.passed]
    assert red == ["no synchronisation"]


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
    red = [check.name for check in seen.checks if not check.passed]
    if seen.run.clock is not None:
        red += [c.name for c in run_checks(seen.run, seen.waits, (), None) if not c.passed]
    assert red
