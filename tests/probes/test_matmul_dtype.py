from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import steplab
from steplab.meter import meter as meter_module
from steplab.probes.ran import matmul_dtype, matmul_shares
from tests.meter.fakes import tiny_model

CPU = torch.device("cpu")
BF16 = {"device_type": "cpu", "dtype": torch.bfloat16}


def inspected(model: nn.Module, run: Callable[[], Any], **asked: Any) -> steplab.Meter:
    """Run three steps of which the second is inspected."""
    meter = steplab.Meter(model, inspect_step=2, **asked)
    for _ in range(3):
        with meter.step(tokens=8):
            run()
    return meter


def train(model: nn.Module, autocast: bool = True) -> None:
    with torch.autocast(**BF16, enabled=autocast):  # type: ignore[arg-type]
        loss = model(torch.randn(8, 16)).float().square().mean()
    loss.backward()


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter_module, "device_name", lambda device: "NVIDIA H200")


# The dtype of a real step.


def test_a_bf16_loop_is_held_against_the_bf16_peak(on_h200: None) -> None:
    model = tiny_model()
    meter = inspected(model, lambda: train(model))
    assert meter.dtype == "bf16"
    summary = meter.summary()
    assert summary.dtype == "bf16" and summary.figures.peak_tflops == 989.4
    assert "MFU unknown" not in meter.line() and summary.notes == ()


def test_half_and_single_precision_are_told_apart() -> None:
    half = tiny_model().half()
    x_BD = torch.randn(8, 16, dtype=torch.float16)
    assert inspected(half, lambda: half(x_BD).sum().backward()).dtype == "fp16"
    single = tiny_model()
    assert inspected(single, lambda: train(single, autocast=False)).dtype == "fp32"


@pytest.fixture
def precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    torch.set_float32_matmul_precision(before)


def test_float_is_tf32_where_the_loop_allows_it(precision: None) -> None:
    torch.set_float32_matmul_precision("high")
    model = tiny_model()
    assert inspected(model, lambda: train(model, autocast=False)).dtype == "tf32"
    torch.set_float32_matmul_precision("highest")
    # Set for one backend only: torch.get_float32_matmul_precision() raises then.
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    product = traced("aten::mm", "float", (4, 4), (4, 4))
    assert matmul_dtype([product], torch.device("cuda"))[0] == "tf32"
    assert matmul_dtype([product], CPU)[0] == "fp32"


def test_products_that_autocast_wraps_count_once() -> None:
    # einsum and bmm show an fp32 call around the bf16 one; both would make the step mixed.
    weight_DF = nn.Parameter(torch.randn(16, 32))

    def run() -> None:
        with torch.autocast(**BF16):  # type: ignore[arg-type]
            y_BF = torch.einsum("bd,df->bf", torch.randn(8, 16), weight_DF)
            z_1BF = torch.bmm(torch.randn(1, 8, 16), weight_DF[None])
            w_BF = torch.addmm(torch.randn(32), torch.randn(8, 16), weight_DF)
        (y_BF.sum() + z_1BF.sum() + w_BF.sum()).float().backward()

    assert inspected(nn.ParameterList([weight_DF]), run).dtype == "bf16"


def test_a_small_fp32_router_changes_nothing() -> None:
    router, expert = nn.Linear(64, 2), nn.Linear(64, 256)
    x_BD = torch.randn(8, 64)

    def run() -> None:
        with torch.autocast(**BF16):  # type: ignore[arg-type]
            y_BF = expert(x_BD)
        (router(x_BD).sum() + y_BF.float().sum()).backward()

    assert inspected(nn.ModuleList([router, expert]), run).dtype == "bf16"


# Where it is not known, MFU is not either.


def test_mixed_dtypes_have_no_mfu_and_the_note_says_why(on_h200: None) -> None:
    model = tiny_model()

    def run() -> None:
        train(model, autocast=True)
        train(model, autocast=False)

    meter = inspected(model, run)
    told = "warning: MFU unknown: step 2 ran its matrix products in 50.0 % "
    assert told in meter.line() and "pass dtype= (fp32, tf32, bf16, fp16, fp8)." in meter.line()
    with meter.step(tokens=8):
        run()
    assert "warning" not in meter.line() and "MFU unknown" in meter.line()
    summary = meter.summary()
    assert summary.figures.mfu is None and summary.dtype is None and len(summary.notes) == 1
    assert "dtype of the matrix products is not known" in summary.figures.peak_source
    given = inspected(model, run, dtype="bf16")
    assert given.summary().figures.mfu is not None and given.summary().notes == ()


def test_a_step_without_products_has_no_mfu(on_h200: None) -> None:
    meter = inspected(tiny_model(), lambda: torch.ones(3).sum())
    assert "MFU unknown: step 2 called no matrix product" in meter.line()


def test_before_the_inspected_step_nothing_is_said(on_h200: None) -> None:
    meter = steplab.Meter(tiny_model(), inspect_step=3)
    with meter.step(tokens=8):
        pass
    assert "MFU unknown" in meter.line() and "warning" not in meter.line()
    assert meter.dtype is None and meter.summary().notes == ()


def test_without_inspection_the_dtype_must_be_given(on_h200: None) -> None:
    meter = steplab.Meter(tiny_model(), peak_tflops=100, inspect_step=None)
    with meter.step(tokens=8):
        pass
    assert "warning: MFU unknown: no step is inspected; pass dtype=" in meter.line()
    assert "train/mfu" not in meter.metrics() and "train/tflops" in meter.metrics()


# Calls as the profiler tells them.


def traced(name: str, dtype: str, *shapes: tuple[int, ...], at: int = 0, ns: int = 5) -> Any:
    return SimpleNamespace(
        name=lambda: name,
        dtypes=lambda: [dtype] * len(shapes),
        shapes=lambda: [list(shape) for shape in shapes],
        start_thread_id=lambda: 1,
        start_ns=lambda: at,
        end_ns=lambda: at + ns,
    )


def test_multiply_adds_are_those_of_the_shapes() -> None:
    calls = [
        traced("aten::mm", "float", (2, 3), (3, 5), at=0),  # 30
        traced("aten::addmm", "c10::Half", (5,), (2, 3), (3, 5), at=10),  # 30
        traced("aten::bmm", "c10::BFloat16", (4, 2, 3), (4, 3, 5), at=20),  # 120
        traced("aten::_grouped_mm", "c10::BFloat16", (2, 3), (4, 3, 5), at=30),  # 30
        traced("aten::_grouped_mm", "c10::BFloat16", (4, 2, 3), (3, 5), at=40),  # 30
        traced("aten::_scaled_mm", "c10::Float8_e4m3fn", (2, 3), (3, 20), at=50),  # 120
        traced("aten::sum", "float", (1000, 1000), at=60),
    ]
    expected = {"c10::BFloat16": 0.5, "c10::Float8_e4m3fn": 1 / 3}
    expected |= {"float": 1 / 12, "c10::Half": 1 / 12}
    assert matmul_shares(calls) == pytest.approx(expected)
    assert matmul_dtype(calls[5:], CPU) == (None, "ran its matrix products in c10::Float8_e4m3fn")


def test_95_percent_of_the_work_decide() -> None:
    most = traced("aten::mm", "c10::BFloat16", (19, 10), (10, 10), at=0)
    rest = traced("aten::mm", "float", (1, 10), (10, 10), at=10)
    assert matmul_dtype([rest, most], CPU) == ("bf16", "")
    more = traced("aten::mm", "float", (1, 10), (10, 1), at=20)
    dtype, reason = matmul_dtype([most, rest, more], CPU)
    assert dtype is None and reason == "ran its matrix products in 94.5 % bf16, 5.5 % fp32"


def test_calls_in_two_threads_do_not_hide_each_other() -> None:
    forward = traced("aten::mm", "float", (2, 2), (2, 2), at=0, ns=100)
    backward = traced("aten::mm", "c10::BFloat16", (2, 2), (2, 2), at=10)
    backward.start_thread_id = lambda: 2
    assert matmul_shares([forward, backward]) == {"float": 0.5, "c10::BFloat16": 0.5}


def test_the_inspected_step_prints_nothing() -> None:
    code = (
        "import torch, steplab\n"
        "meter = steplab.Meter(torch.nn.Linear(2, 2), inspect_step=1)\n"
        "with meter.step(tokens=1): pass\n"
        "assert meter.summary().inspected_step == 1"
    )
    bare = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    bare["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run([sys.executable, "-c", code], env=bare, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
