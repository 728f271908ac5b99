"""Every rung that was not climbed says what to do about it."""

from dataclasses import replace

import pytest

from steplab.core import Compilation, Recompile
from steplab.core.errors import MeasurementError
from steplab.core.ladder import Check
from steplab.techniques import recipes
from steplab.tune.champion import _raise_failure
from steplab.tune.rung import remedy_for_checks, remedy_for_run
from steplab.verify.remote import CandidateResult
from tests.compare.sides import run_of
from tests.tune.ladders import FakeTechnique, use_techniques


@pytest.mark.parametrize(
    ("status", "technique", "said"),
    [
        ("failed", "compile", "bench step --recipe"),
        ("failed", "impl", "bench step --recipe"),
        ("oom", "cuda_graph", "checkpointing"),
        ("timeout", "compile", "--budget"),
        ("crashed", "impl", "bench step"),
    ],
)
def test_a_rung_that_could_not_run_has_a_remedy(status, technique, said):
    assert said in remedy_for_run(replace(run_of(), status=status), technique)


def test_a_graph_break_is_told_from_other_faults_of_compiling():
    broken = replace(run_of(), status="failed", reason="Unsupported: a print (own.py:7)")
    assert "compile.fullgraph=false" in remedy_for_run(broken, "compile")


@pytest.mark.parametrize(
    ("scheme", "ranks", "said"), [("bucket", 2, "parallel=fsdp"), ("fsdp", 2, ""), ("ddp", 1, "")]
)
def test_what_does_not_fit_whole_may_fit_in_parts(scheme, ranks, said):
    run = run_of(recipe={"parallel": {"data": scheme}}, ranks=ranks)
    result = CandidateResult(replace(run, status="oom", reason="no memory."))
    with pytest.raises(MeasurementError, match="oom, no memory") as refused:
        _raise_failure(result)
    assert said in refused.value.suggestion and bool(said) == bool(refused.value.suggestion)


def test_a_refusal_has_told_its_remedy_already():
    assert remedy_for_run(replace(run_of(), status="unsupported"), "cuda_graph") == ""


def test_a_compiled_step_that_is_no_faster_is_looked_at():
    """Compiled anew for other shapes, in pieces, or neither."""
    assert recipes.technique("optimizer").remedy(run_of()) == ""
    again = Compilation(3, 0, recompiles=(Recompile("forward", "size mismatch"),))
    broken = Compilation(2, 0, breaks={"print": 2})
    for compiled, said in ((again, "size mismatch"), (broken, "2 graph breaks")):
        assert said in recipes.technique("compile").remedy(replace(run_of(), compilation=compiled))
    clean = replace(run_of(), compilation=Compilation(1, 0))
    assert "little to fuse" in recipes.technique("compile").remedy(clean)


def test_a_technique_of_ones_own_tells_its_own_remedy(monkeypatch):
    class Helpful(FakeTechnique):
        def remedy(self, run):
            return f"turn it round ({run.status})"

    use_techniques(monkeypatch, {"helpful": Helpful({})})
    assert remedy_for_run(replace(run_of(), status="oom"), "helpful") == "turn it round (oom)"
    assert recipes.technique("helpful").remedy(run_of()) == "turn it round (ok)"


def test_a_red_check_has_one():
    for name in ("no synchronization", "memory within the limit", "gradients"):
        assert remedy_for_checks([Check("loss", True, ""), Check(name, False, "x")])
