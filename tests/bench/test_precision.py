from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steplab.bench import precision
from steplab.bench.precision import (
    FORMULAS,
    accumulate,
    accumulation_table,
    normalization_errors,
    normalization_table,
    relative_error,
    torch_op,
)
from steplab.cli.main import main
from steplab.core import Accelerator, Environment, RunSpec, Table
from steplab.core.errors import Unsupported
from steplab.store import Store

CPU = torch.device("cpu")
SMALL = ["--layers", "2", "--context", "16", "--width", "32", "--ff-width", "64"]


def to_bf16(value: float) -> float:
    """Round a number to bf16 by its fp32 bits, nearest even."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    rounded: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return rounded


def cells(table: Table, *keys: Any) -> dict[str, Any]:
    row = next(row for row in table.rows if row[: len(keys)] == keys)
    return {column.name: cell for column, cell in zip(table.columns, row, strict=True)}


@pytest.mark.parametrize(
    ("accumulator", "increment", "cast", "expected"),
    [
        ("fp32", "fp32", False, 10.0001),
        ("fp16", "fp16", False, 9.9531),
        ("fp32", "fp16", False, 10.0021),
        ("fp32", "fp16", True, 10.0021),
        ("bf16", "bf16", False, 4.0),
        ("fp32", "bf16", False, 10.0098),
        ("fp64", "fp64", False, 10.0),
    ],
)
def test_sums_have_known_values(
    accumulator: str, increment: str, cast: bool, expected: float
) -> None:
    result, _ = accumulate(accumulator, increment, cast, CPU)
    assert round(result, 4) == expected


@pytest.mark.parametrize(("name", "kind"), [("fp16", np.float16), ("fp32", np.float32)])
def test_sums_agree_with_numpy(name: str, kind: Any) -> None:
    total = kind(0)
    for _ in range(1000):
        total = kind(total + kind(0.01))
    assert accumulate(name, name, False, CPU) == (float(total), None)


def test_a_bf16_sum_stalls_where_rounding_by_hand_does() -> None:
    total, stalled = 0.0, None
    for step in range(1, 1001):
        following = to_bf16(total + to_bf16(0.01))
        if following == total and stalled is None:
            stalled = step
        total = following
    assert stalled is not None
    assert accumulate("bf16", "bf16", False, CPU) == (total, stalled)


@pytest.mark.parametrize(("name", "kind"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_an_fp32_sum_is_off_only_by_the_rounding_of_the_increment(
    name: str, kind: torch.dtype
) -> None:
    result, stalled = accumulate("fp32", name, False, CPU)
    assert result == 1000 * torch.tensor(0.01, dtype=kind).item()
    assert stalled is None


def test_the_accumulation_table_names_the_stall() -> None:
    table = accumulation_table(CPU)
    bf16 = cells(table, "bf16", "bf16")
    assert (bf16["result"], bf16["error"], bf16["stalls at step"]) == (4.0, -6.0, 351)
    assert cells(table, "fp32", "fp16 cast to fp32")["stalls at step"] == "none"
    assert abs(cells(table, "fp64", "fp64")["error"]) < 1e-12


@pytest.mark.parametrize("op", list(FORMULAS))
def test_formulas_are_torchs_operations_in_fp64(op: str) -> None:
    x = torch.randn(5, 33, dtype=torch.float64) * 3 + 2
    torch.testing.assert_close(FORMULAS[op](x)[0], torch_op(op, x), rtol=1e-12, atol=1e-14)


def test_fp32_statistics_reach_the_rounding_floor_and_low_ones_do_not() -> None:
    table = normalization_table(CPU, ["bf16", "fp16"])
    assert len(table.rows) == 3 * 2 * 3 * 2
    for row in table.rows:
        found = cells(table, *row[:4])
        floor = found["rounding floor"]
        # torch casts fp64 by way of fp32 and so rounds twice: the floor is nearly the least.
        # 1e-6 is fp32's own error, which counts where a one-hot softmax has a floor near zero.
        assert 0.999 * floor <= found["fp32 statistics"] <= 1.01 * floor + 1e-6
        assert 0.999 * floor <= found["low statistics"]
    for dtype in ("bf16", "fp16"):
        centered, offset = (cells(table, "LayerNorm", dtype, mean, 1) for mean in (0, 100))
        assert offset["low statistics"] > 5 * centered["low statistics"]


def test_only_fp16_squares_overflow_and_the_row_says_so() -> None:
    table = normalization_table(CPU, ["bf16", "fp16"])
    overflowed = {row[:4] for row in table.rows if row[-1] != "ok"}
    ops = ("RMSNorm", "LayerNorm")
    assert overflowed == {(op, "fp16", mean, 300) for op in ops for mean in (0, 10, 100)}
    row = cells(table, "RMSNorm", "fp16", 0, 300)
    assert row["status"] == "statistics overflow" and row["low statistics"] == 1.0


def test_non_finite_results_are_named() -> None:
    x = torch.ones(2, 8, dtype=torch.float16)
    assert relative_error(x * math.inf, x.double()) == "non-finite"
    x[0, 0] = math.inf
    assert normalization_errors("RMSNorm", x)[-1] == "non-finite result"


def test_a_model_that_cannot_run_is_a_row_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(spec: RunSpec, dtype: str) -> Table:
        if dtype == "fp16":
            raise Unsupported("attention 'x' needs cuda.", "Use cuda.")
        raise RuntimeError('"op" not implemented for BFloat16')

    monkeypatch.setattr(precision, "audit_workload", refuse)
    table = precision.autocast_table(RunSpec("gpt", size="tiny"), ["bf16", "fp16"])
    status = {(row[0], row[2]): row[-1] for row in table.rows}
    assert status["toy", "bf16"] == status["toy", "fp16"] == "ok"
    assert status["gpt tiny", "fp16"] == "unsupported: attention 'x' needs cuda. Use cuda."
    assert status["gpt tiny", "bf16"].startswith("failed: RuntimeError:")  # type: ignore[union-attr]
    assert not precision.workload_was_audited(table)


def test_the_command_prints_writes_and_saves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, out = tmp_path / "store", tmp_path / "tables"
    files = ["--out", str(out / "p.csv"), str(out / "p.json")]
    words = ["bench", "precision", "gpt", "--dtype", "bf16", "--device", "cpu", *SMALL]
    assert main([*words, *files, "--store", str(store)]) == 0
    printed = capsys.readouterr().out
    assert "blocks.*.attention.q" in printed and "saved" in printed
    kept = Store(store).load("last")
    assert list(kept.tables) == ["accumulation", "normalization", "dtypes"]
    assert kept.status == "ok" and kept.spec.config["layers"] == 2
    assert (kept.spec.size, kept.spec.recipe.label) == ("tiny", "precision=bf16")
    wanted = {f"p.{name}{suffix}" for name in kept.tables for suffix in (".csv", ".json")}
    assert {path.name for path in out.iterdir()} == wanted
    written = json.loads((out / "p.accumulation.json").read_text())
    assert written["rows"][0][2] == kept.tables["accumulation"].rows[0][2]
    dtypes = kept.tables["dtypes"]
    assert cells(dtypes, "gpt tiny", "cpu", "bf16", "blocks.*.attention.q")["count"] == 2
    assert cells(dtypes, "gpt tiny", "cpu", "bf16", "loss")["output"] == "float32"


def test_the_conditions_are_those_of_the_device_that_was_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card = Accelerator("a GPU", 2**30)
    here = Environment("0", "3.11", "Linux", "a CPU", 8, None, threads=3, accelerators=(card,))
    monkeypatch.setattr("steplab.probes.environment.capture_environment", lambda: here)
    words = ["bench", "precision", "--dtype", "bf16", "--device", "cpu", *SMALL]
    assert main([*words, "--store", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "a CPU, 3 threads" in printed and "a GPU" not in printed


def test_a_workload_that_runs_nowhere_is_a_failed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(spec: RunSpec, dtype: str) -> Table:
        raise RuntimeError("boom")

    monkeypatch.setattr(precision, "audit_workload", fail)
    words = ["bench", "precision", "--dtype", "bf16", "--device", "cpu", "--store", str(tmp_path)]
    assert main(words) == 4
    assert "failed: RuntimeError: boom" in capsys.readouterr().out
    assert Store(tmp_path).load("last").status == "failed"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--size", "tinny"], "Did you mean 'tiny'?"),
        (["--dtype", "bf61"], "Did you mean 'bf16'?"),
        (["--dtype", "fp8"], "fp16"),
        (["--layer", "2"], "Did you mean '--layers'?"),
        (["--device", "gpu"], "--device"),
        (["--layers", "0"], "at least 1"),
        (["--out", "table.xls"], ".csv"),
        (["gtp"], "Did you mean 'gpt'?"),
        (["--size", "tiny", "other"], "right after the command"),
    ],
)
def test_bad_values_are_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "precision", *words, "--store", str(tmp_path / "store")]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and not printed.out
    assert not (tmp_path / "store").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_cuda_without_a_gpu_is_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "precision", "--device", "cuda", "--store", str(tmp_path)]
    assert main(words) == 2
    assert "--device cpu" in capsys.readouterr().err


def test_the_command_and_its_tables_import_without_torch() -> None:
    code = "import sys, steplab.cli.bench.precision; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
