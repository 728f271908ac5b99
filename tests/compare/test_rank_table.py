from dataclasses import replace

import pytest

from steplab.compare.rank_table import rank_table
from steplab.core.run import RankResult
from tests.compare.sides import run_of

DDP = {"parallel": {"data": "ddp"}}


def shared(ranks, ms, recipe=None):
    """A Run of `ranks` ranks, each with the work of one, whose step took `ms`."""
    run = run_of((ms,) * 3, recipe=recipe, ranks=ranks)
    results = tuple(RankResult(ms, 1.0, 2.0 + rank, 2**30, 7) for rank in range(ranks))
    work = replace(run.work, tokens=ranks * run.work.tokens)
    return replace(run, work=work, ranks=results if ranks > 1 else ())


def column(table, name):
    index = [column.name for column in table.columns].index(name)
    return [row[index] for row in table.rows]


def test_efficiency_is_measured_against_one_rank_without_a_scheme():
    table = rank_table([shared(1, 10.0), shared(1, 12.5, DDP), shared(2, 20.0, DDP)])
    assert column(table, "efficiency") == [100.0, pytest.approx(80.0), pytest.approx(50.0)]
    assert column(table, "tokens/s") == [51_200, 40_960, 51_200]
    assert column(table, "exposed communication") == [None, None, 3.0]


def test_another_scheme_is_no_base():
    flat = shared(2, 10.0, {"parallel": {"data": "flat"}})
    table = rank_table([flat, shared(4, 10.0, DDP)])
    assert column(table, "efficiency") == [100.0, 100.0]


def test_a_rank_that_died_is_a_row():
    dead = replace(shared(2, 10.0, DDP), status="crashed", reason="rank 1: SIGKILL", clock=None)
    table = rank_table([shared(1, 10.0), dead])
    assert column(table, "status") == ["ok", "crashed: rank 1: SIGKILL"]


def test_what_makes_a_row_doubtful_stands_in_it():
    busy = replace(shared(2, 10.0, DDP), notes=("contended: threads waited; others use it",))
    assert column(rank_table([shared(1, 10.0), busy]), "status") == ["ok", "ok, contended"]


def test_steps_of_one_rank_need_no_table():
    assert rank_table([shared(1, 10.0)]) is None
