"""The search over batches, against made-up machines whose best batch is known."""

import pytest

from steplab.core import Clock, Environment, Run, RunSpec, Samples, Work
from steplab.step.batch_size import fastest_batch

TOKENS = 100  # per sequence


def run_of(batch: int, ms: float | None, status: str = "ok") -> Run:
    environment = Environment("0", "3.11", "Linux", "cpu", 2, None)
    spec = RunSpec("gpt", batch=batch)
    if ms is None:
        return Run("id", spec, environment, status=status, reason=status)
    empty = Samples((), "ms")
    clock = Clock(Samples((ms,) * 3, "ms"), empty, empty, {}, {}, ms, "perf_counter")
    work = Work(tokens=TOKENS * batch, model=1.0, palm=1.0, hardware=1.0, formula="")
    return Run("id", spec, environment, clock=clock, work=work)


def machine(fixed: float, each: float, fits: int, status: str = "oom"):
    """A step takes `fixed` ms and `each` ms a sequence, up to `fits` sequences."""
    return lambda batch: run_of(batch, fixed + each * batch if batch <= fits else None, status)


def test_a_larger_batch_wins_while_it_fits():
    found = fastest_batch(machine(10, 1, fits=20))
    assert [run.spec.batch for run in found.runs] == [1, 2, 4, 8, 16, 32, 24]
    assert found.best.spec.batch == 16 and found.reason == "32 sequences: oom"


def test_half_way_to_the_one_that_does_not_fit():
    found = fastest_batch(machine(10, 1, fits=30))
    assert found.best.spec.batch == 24


def test_where_more_brings_nothing_the_smaller_one_wins():
    found = fastest_batch(machine(0.01, 1, fits=10**6))
    assert found.best.spec.batch == 1 and len(found.runs) == 3
    assert found.reason == "no gain beyond 1 sequences"


def test_a_fault_that_is_no_lack_of_memory_is_not_tried_again():
    found = fastest_batch(machine(10, 1, fits=3, status="failed"))
    assert [run.spec.batch for run in found.runs] == [1, 2, 4] and found.best.spec.batch == 2


def test_nothing_fits():
    found = fastest_batch(machine(10, 1, fits=0))
    assert found.best is None and found.reason == "1 sequences: oom"


def test_there_is_an_end():
    found = fastest_batch(machine(10**6, 1e-9, fits=10**9), most=64)
    assert found.best.spec.batch == 64 and "the most that is tried" in found.reason


def test_rate():
    assert run_of(4, 2.0).tokens_per_second == pytest.approx(200_000)
    assert run_of(4, None, "oom").tokens_per_second is None
