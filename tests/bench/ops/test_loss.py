"""`bench loss`: its cells, its check against fp64, and what becomes of wrong results."""

import json

import pytest
import torch

from steplab.bench.op_cell import measure_cell
from steplab.bench.op_results import cell_result
from steplab.bench.ops.loss import BENCH, LossInstance
from steplab.cli.main import main
from steplab.core import RunSpec
from steplab.core.errors import UserError
from steplab.kernels import cross_entropy as op
from tests.bench.op_runs import InThisProcess

TEMPLATE = RunSpec("loss", mode="forward+backward", steps=2, warmup=1)


def cells(**changes):
    asked = {"tokens": [96], "width": [16], "vocabulary": [203], "reduction": ["mean"]}
    asked |= {"dtype": ["fp32"], "weight": ["same"], "impl": ["reference", "chunked"]}
    return BENCH.cells({**asked, **changes}, TEMPLATE, seconds=0.0)


def test_cells_are_all_combinations_once():
    specs = cells(tokens=[8, 16], reduction=["mean", "none"], impl=["chunked", "chunked"])
    assert len(specs) == 4 and specs[0].config["weight"] == "weight in fp32"
    mixed = cells(dtype=["bf16"], weight=["same", "fp32"], impl=["reference"])
    assert [s.config["weight"] for s in mixed] == ["weight in bf16", "weight in fp32"]


def test_bad_values_are_refused():
    with pytest.raises(UserError, match="Did you mean 'chunked'"):
        cells(impl=["chunkd"])
    with pytest.raises(UserError, match="--vocabulary must be at least 2"):
        cells(vocabulary=[1])


def test_the_products_of_each_implementation_are_counted_where_they_happen():
    one = 2.0 * 96 * 203 * 16
    expected = {
        ("reference", "mean"): (1, 2),
        ("compiled-reference", "none"): (1, 2),
        ("chunked", "mean"): (3, 0),
        ("compiled-triton_chunked", "mean"): (3, 0),
        ("triton_chunked", "none"): (1, 3),
        ("triton_lean", "mean"): (1, 3),
    }
    for (impl, reduction), products in expected.items():
        (spec,) = cells(impl=[impl], reduction=[reduction])
        assert BENCH.flops(spec.config) == tuple(n * one for n in products)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtypes", [("fp32", "same"), ("bf16", "same"), ("bf16", "fp32")])
def test_a_right_implementation_is_within_its_budget(dtypes, reduction):
    axes = {"dtype": [dtypes[0]], "weight": [dtypes[1]], "reduction": [reduction]}
    for spec in cells(**axes):
        results, checked = LossInstance(spec.config, 1, torch.device("cpu")).check()
        assert checked == "all tokens" and [d.name for d in results] == list(BENCH.results)
        assert all(0 <= d.of_budget <= 1 for d in results)


@pytest.mark.parametrize("width", [8, 64])
def test_the_definition_is_right_however_it_is_cut(width, monkeypatch):
    """A word that one token makes up: the sum over the other tokens rounds at its size."""
    monkeypatch.setattr("steplab.bench.ops.loss.MAX_LOGITS", {"cpu": 16 * 9001})
    sizes = {"tokens": [512], "width": [width], "vocabulary": [9001]}
    for spec in cells(**sizes):
        results, _ = LossInstance(spec.config, 1, torch.device("cpu")).check()
        assert max(d.of_budget for d in results) <= 1


def test_fewer_tokens_are_checked_where_time_is_short(monkeypatch):
    monkeypatch.setattr("steplab.bench.ops.loss.MAX_FLOPS", {"cpu": 10 * 3 * 2.0 * 16 * 203})
    (spec,) = cells(impl=["chunked"])
    assert LossInstance(spec.config, 1, torch.device("cpu")).check()[1] == "10 tokens instead"


def test_one_wrong_row_makes_the_cell_wrong(monkeypatch):
    right = op.cross_entropy

    def wrong(impl, x, weight, targets, reduction):
        targets = targets.clone()
        targets[50] = (targets[50] + 1) % len(weight)
        return right(impl, x, weight, targets, reduction)

    monkeypatch.setattr(op, "cross_entropy", wrong)
    (spec,) = cells(impl=["chunked"])
    run = measure_cell(spec)
    assert run.status == "failed" and cell_result(run).status == "wrong", run.reason
    assert run.clock is not None and run.memory is not None


def test_chunks_hold_less_than_whole_logits(monkeypatch):
    """4096 x 1003 fp32 logits are 15.7 MiB; a chunk of 256 tokens is a sixteenth of them."""
    monkeypatch.setattr("steplab.kernels.cross_entropy._chunks.MIN_TOKEN_BYTES", 1)
    monkeypatch.setattr("steplab.kernels.cross_entropy._chunks.TILES", 0)
    extra = {}
    for spec in cells(tokens=[4096], vocabulary=[1003]):
        extra[spec.config["impl"]] = cell_result(measure_cell(spec)).extra_bytes
    assert extra["chunked"] < 0.25 * extra["reference"]


def test_the_command_writes_its_table_and_a_chart(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("steplab.cli.op_bench.TrialRunner", InThisProcess)
    words = "bench loss --device cpu --tokens 64 --width 8 --vocabulary 101 --repeats 2 --seconds 0"
    words += f" --impl reference chunked triton_lean --store {tmp_path / 'store'}"
    out, plot = tmp_path / "loss.json", tmp_path / "loss.svg"
    assert main([*words.split(), "--out", str(out), "--plot", str(plot)]) == 0
    shown = capsys.readouterr().out
    assert "best by both" in shown and "needs an NVIDIA GPU" in shown
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 3 and "<svg" in plot.read_text()
