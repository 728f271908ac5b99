import pytest
import torch

from steplab.bench.op_cell import measure_cell
from steplab.bench.op_results import cell_result
from steplab.bench.ops import experts
from steplab.bench.ops.experts import BENCH, ExpertsInstance, assign_experts
from steplab.core import RunSpec
from steplab.core.errors import UserError

CPU = torch.device("cpu")


def cells(**changes):
    asked = {"tokens": [48], "width": [16], "inner": [24], "experts": [4], "top_k": [2]}
    asked |= {"activation": ["gelu"], "routing": ["skewed"], "dtype": ["fp32"]}
    template = RunSpec("experts", device="cpu", steps=2, warmup=1)
    return BENCH.cells({**asked, "impl": ["grouped"], **changes}, template, 0.0)


@pytest.mark.parametrize("routing", ["balanced", "skewed", "collapsed"])
def test_every_token_has_different_experts(routing):
    experts_TK = assign_experts(routing, 200, 7, 3, seed=1)
    assert experts_TK.shape == (200, 3) and experts_TK.dtype == torch.int64
    assert all(len(set(row)) == 3 for row in experts_TK.tolist())
    assert (assign_experts(routing, 200, 7, 3, seed=1) == experts_TK).all()


def test_loads_of_each_routing():
    def load(routing):
        return torch.bincount(assign_experts(routing, 4000, 8, 2, seed=0).flatten(), minlength=8)

    assert set(load("balanced").tolist()) == {1000}
    skewed = load("skewed")
    assert (skewed[:-1] > skewed[1:]).all() and skewed[0] > 3 * skewed[7]
    assert load("collapsed").tolist() == [4000, 4000, 0, 0, 0, 0, 0, 0]


def test_flops_of_the_flagship():
    """Two matrices of 768 x 3072 over 131,072 rows; 0.95 ms each are 650 TFLOP/s."""
    config = {"tokens": 65536, "top_k": 2, "width": 768, "inner": 3072, "activation": "gelu"}
    forward, backward = BENCH.flops(config)
    assert forward == 2 * 2 * 131072 * 768 * 3072 and backward == 2 * forward
    assert BENCH.flops({**config, "activation": "swiglu"})[0] == 1.5 * forward


def test_a_cell_for_every_combination():
    found = cells(routing=["balanced", "collapsed"], impl=["loop", "grouped"], tokens=[16, 32])
    assert len(found) == 8 and found[0].config["impl"] == "loop"
    assert [spec.config["routing"] for spec in found[:4]] == ["balanced"] * 2 + ["collapsed"] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": [5]}, "cannot choose 5 of 4"),
        ({"tokens": [0]}, "--tokens must be at least 1"),
        ({"impl": ["groupd"]}, "Did you mean 'grouped'"),
    ],
)
def test_bad_values_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        cells(**changes)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_grouped_is_within_its_budget(dtype, activation):
    (spec,) = cells(dtype=[dtype], activation=[activation])
    found, checked = ExpertsInstance(spec.config, 0, CPU).check()
    assert [d.name for d in found] == list(BENCH.results) and checked == "all tokens"
    assert max(d.of_budget for d in found) <= 1, found


def test_fewer_tokens_are_checked_where_time_is_short(monkeypatch):
    (spec,) = cells()
    monkeypatch.setitem(experts.MAX_FLOPS, "cpu", sum(BENCH.flops(spec.config)) / 2)
    found, checked = ExpertsInstance(spec.config, 0, CPU).check()
    assert checked == "24 tokens instead" and max(d.of_budget for d in found) <= 1


def test_dropping_rows_is_wrong_and_noted():
    even, uneven = cells(impl=["capacity"], routing=["balanced", "collapsed"], tokens=[128])
    assert measure_cell(even).status == "ok"
    run = measure_cell(uneven)
    assert cell_result(run).status == "wrong" and cell_result(run).both_ms > 0
    assert any("of the rows dropped" in note for note in run.notes)


def test_an_implementation_that_does_not_compile_is_a_row(monkeypatch):
    def refuse(function, **options):
        assert options == {"fullgraph": True, "dynamic": False}
        return lambda *inputs: 1 / 0

    monkeypatch.setattr(torch, "compile", refuse)
    (spec,) = cells(impl=["compiled-loop"])
    run = measure_cell(spec)
    assert run.status == "failed" and run.reason == "ZeroDivisionError: division by zero"
    assert run.clock is None
