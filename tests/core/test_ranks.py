from dataclasses import replace

import pytest

from steplab.core import Environment, RunSpec, Samples
from steplab.core.ranks import merge_ranks, slowest
from steplab.core.run import (
    Clock,
    Collective,
    Communication,
    Figures,
    Memory,
    Work,
    new_run,
    run_from_json,
    run_to_json,
)

ENVIRONMENT = Environment("0", "3.11", "Linux", "cpu", 2, None)


def ms(*values):
    return Samples(values, "ms")


def rank_run(steps, sync, peak, **changes):
    phases = {"backward": ms(*steps), "sync": ms(*sync)}
    clock = Clock(ms(*steps), ms(*steps), ms(0.0, 0.0), phases, {}, sum(steps), "perf_counter")
    run = replace(
        new_run(RunSpec("gpt", ranks=2), ENVIRONMENT),
        clock=clock,
        memory=Memory(0, peak, None, None, "test"),
        work=Work(100, 1e9, 2e9, None),
        figures=Figures(0.5, 0.6, None, 10.0, "test"),
        parameters=7,
    )
    return replace(run, **changes)


def test_the_slowest_rank_times_every_step():
    assert slowest([ms(1, 5), ms(2, 3)]).values == (2, 5)


def test_two_ranks_are_one_run():
    first = rank_run((10.0, 10.0), (1.0, 1.0), 5, notes=("noisy: 20%",))
    second = rank_run((20.0, 20.0), (3.0, 3.0), 9, notes=("noisy: 30%", "clocks differ: 2"))
    run = merge_ranks({0: first, 1: second})
    assert run.clock.step.values == (20.0, 20.0)
    assert run.work == Work(200, 2e9, 4e9, None)
    assert run.tokens_per_second == 200 / 20e-3
    assert run.figures.mfu == pytest.approx(0.25)  # rank 0 waits for the other one
    assert run.memory.peak == 9
    assert run.notes == ("noisy: 20%", "clocks differ: 2")
    assert [(r.step_ms, r.sync_ms, r.peak_bytes) for r in run.ranks] == [(10, 1, 5), (20, 3, 9)]
    assert run_from_json(run_to_json(run)) == run


@pytest.mark.parametrize("others", [{0: rank_run((10.0,), (1.0,), 5)}, {}])
def test_a_rank_that_failed_fails_the_run(others):
    bad = replace(rank_run((10.0,), (1.0,), 5), status="oom", reason="no memory", clock=None)
    run = merge_ranks({**others, 1: bad})
    assert (run.status, run.reason) == ("oom", "rank 1: no memory")


def test_clocks_agree_as_they_do_on_the_worst_rank():
    """Steps in which one rank or the other is slow add up to more than any rank's window."""
    first = rank_run((10.0, 20.0), (1.0, 1.0), 5)
    second = rank_run((20.0, 10.0), (1.0, 1.0), 5)
    assert merge_ranks({0: first, 1: second}).clock.agreement == pytest.approx(1.0)
    put_off = replace(second, clock=replace(second.clock, window_ms=40.0))
    assert merge_ranks({0: first, 1: put_off}).clock.agreement == pytest.approx(0.75)


def test_what_the_first_rank_sends_and_the_most_that_any_holds_are_kept():
    sent = (Collective("all-reduce", 2, 3, 100),)
    held = [{"weights": 10, "optimizer state": 8}, {"weights": 10, "optimizer state": 12}]
    runs = [rank_run((1.0,), (0.1,), 5, communication=Communication(sent, h)) for h in held]
    merged = merge_ranks(dict(enumerate(runs)))
    assert merged.communication == Communication(sent, held[1])
    assert (merged.communication.calls, merged.communication.bytes) == (3, 100)
    assert run_from_json(run_to_json(merged)) == merged
