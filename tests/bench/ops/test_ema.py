"""`bench ema`: its cells, its check against fp64, and the memory bound."""

from dataclasses import replace

import pytest
import torch

from steplab.bench.ops import ema
from steplab.bench.ops.ema import BENCH, EmaInstance, bound_tables, bytes_moved
from steplab.cli.main import main
from steplab.core import Accelerator, Clock, Environment, Run, RunSpec, Samples
from steplab.core.errors import Unsupported, UserError
from tests.bench.op_runs import InThisProcess

CONFIG = {"batch": 2, "context": 20, "width": 6, "modes": 2, "dtype": "fp32", "impl": "fft"}
CPU = torch.device("cpu")


def spec(**changes):
    return RunSpec("ema", {**CONFIG, "seconds": 0.1, **changes})


def instance(**changes):
    return EmaInstance({**CONFIG, **changes}, 42, CPU)


def test_cells_are_all_combinations():
    asked = {"batch": [1, 2], "context": [64], "width": [8], "modes": [4]}
    asked |= {"dtype": ["fp32", "bf16"], "impl": ["fft", "scan"]}
    cells = BENCH.cells(asked, RunSpec("ema"), 1.0)
    assert len(cells) == 8 and len({cell.size for cell in cells}) == 4
    assert cells[0].config["impl"] == "fft" and cells[0].batch == 1
    with pytest.raises(UserError, match="no implementation 'fftt'"):
        BENCH.cells({**asked, "impl": ["fftt"]}, RunSpec("ema"), 1.0)
    with pytest.raises(UserError, match="context must be at least 1"):
        BENCH.cells({**asked, "context": [0]}, RunSpec("ema"), 1.0)


@pytest.mark.parametrize("impl", ["fft", "sequential"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_right_results_are_within_their_budget(impl, dtype):
    case = instance(impl=impl, dtype=dtype)
    results, checked = case.check()
    assert [d.name for d in results] == list(BENCH.results) and checked == "all channels"
    assert max(d.of_budget for d in results) <= 1


def test_a_wrong_result_is_seen():
    case = instance()
    honest = case.call.forward
    case.call = replace(case.call, forward=lambda: honest() * 1.001)
    assert max(d.of_budget for d in case.check()[0]) > 1


def test_long_sequences_are_checked_in_part(monkeypatch):
    monkeypatch.setattr(ema, "MAX_STEPS", {"cpu": 8})
    monkeypatch.setattr(ema, "MAX_STATES", {"cpu": 100})
    _, checked = instance().check()
    assert checked == "8 steps instead, 3 of 6 channels"


def test_an_implementation_that_cannot_run_says_why():
    with pytest.raises(Unsupported, match="needs an NVIDIA GPU"):
        instance(impl="scan")


def test_the_bound_is_every_tensor_once():
    config = {**CONFIG, "batch": 4, "context": 4096, "width": 1024, "dtype": "bf16"}
    assert bytes_moved(config) == (67_108_864, 100_663_296)
    forward, backward = Samples((0.1,), "ms"), Samples((0.2,), "ms")
    clock = Clock(
        Samples((0.3,), "ms"),
        Samples((0.3,), "ms"),
        Samples((), "ms"),
        phases={"forward": forward, "backward": backward},
        host_phases={},
        window_ms=0.3,
        source="cuda events",
    )
    cards = (Accelerator("NVIDIA H200", 2**37),)
    card = Environment("0", "3.11", "Linux", "cpu", 2, None, accelerators=cards)
    run = Run("a", replace(spec(**config), device="cuda"), card, clock=clock)
    (table,) = bound_tables([run])
    (row,) = table.rows
    assert row[3:6] == (0.1, pytest.approx(0.01398, rel=1e-3), pytest.approx(13.98, rel=1e-3))
    assert not bound_tables([replace(run, spec=spec())])


def test_the_command_shows_every_cell(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("steplab.cli.op_bench.TrialRunner", InThisProcess)
    words = "bench ema --context 16 --width 4 --modes 2 --impl fft sequential --repeats 6"
    out = tmp_path / "cells.csv"
    words += f" --warmup 1 --seconds 0 --device cpu --store {tmp_path / 'store'} --out {out}"
    assert main(words.split()) == 0
    shown = capsys.readouterr().out
    assert "sequential" in shown and "best by both" in shown
    assert len(out.read_text().splitlines()) == 3
