from dataclasses import replace

import pytest

from steplab.compare.time_diff import budget_diff, kernel_diff, module_diff, phase_diff
from steplab.core import Samples
from steplab.core.units import fold_layer_numbers
from tests.compare.sides import run_of
from tests.report.analyses import KERNELS, Kernel, analysis_of

A = analysis_of()
B = analysis_of(
    (
        replace(KERNELS[0], duration=1_200_000),
        *KERNELS[1:],
        Kernel("new_kernel", 8_000_000, 300_000, "other", module="head"),
    ),
    steps=2,
)


def test_kernels_are_per_step_and_the_largest_difference_comes_first():
    table = kernel_diff([A], [B])
    assert table.title == "kernels that changed"
    assert table.rows[0] == ("ampere_bf16_s16816gemm", 2.0, 1.2, pytest.approx(-0.8), 1.0, 1.0)
    assert table.rows[1] == ("new_kernel", 0.0, 0.3, pytest.approx(0.3), 0.0, 1.0)
    assert all(row[3] == 0 for row in table.rows[2:]) and len(table.rows) == 5


def test_what_is_left_out_is_summed_up():
    full, short = kernel_diff([A], [B], most=99), kernel_diff([A], [B], most=2)
    assert short.rows[-1][0] == "3 others"
    for column in range(1, 6):
        assert sum(row[column] for row in short.rows) == pytest.approx(
            sum(row[column] for row in full.rows)
        )


def test_the_mean_step_is_that_of_all_cycles():
    longer = analysis_of((replace(KERNELS[0], duration=4_000_000), *KERNELS[1:]), steps=1)
    steps = len(A.windows)
    rows = {row[0]: row for row in kernel_diff([A, longer], [A]).rows}
    row = rows["ampere_bf16_s16816gemm"]
    assert row[1] == pytest.approx((2.0 * steps + 4.0) / (steps + 1))
    assert row[2] == 2.0 and row[4:] == (pytest.approx(1.0), 1.0)


def test_layers_are_folded():
    table = module_diff([A], [B])
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["blocks.*.attention"][:3] == (3.0, 2.2, pytest.approx(-0.8))
    assert rows["head"][1] == pytest.approx(0.3) and "unattributed" in rows
    assert fold_layer_numbers("layers.12.conv1") == "layers.*.conv1"
    assert (
        fold_layer_numbers("Linear_0") == "Linear_*"
        and fold_layer_numbers("model.h.3") == "model.h.*"
    )


def test_the_budget_table_adds_up():
    table = budget_diff(A.budget, B.budget)
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["kernels: matmul bf16"] == (2.0, 1.2, pytest.approx(-0.8))
    assert table.rows[-1][0] == "the whole step"
    assert rows["the whole step"][:2] == (pytest.approx(10.0), pytest.approx(10.0))
    for column in (1, 2, 3):
        assert sum(row[column] for row in table.rows[:-1]) == pytest.approx(table.rows[-1][column])
    differences = [abs(row[3]) for row in table.rows[:-1]]
    assert differences == sorted(differences, reverse=True)


def test_without_a_gpu_they_are_operators():
    cpu = analysis_of(device=False)
    assert kernel_diff([cpu], [cpu]).title == "operators that changed"
    names = [str(row[0]) for row in budget_diff(cpu.budget, cpu.budget).rows]
    assert "operators: matmul bf16" in names and not any("kernels" in name for name in names)
    assert "host" in names and "launch" not in names


def test_work_outside_the_steps_is_left_out():
    outside = replace(A, work=replace(A.work, step=A.work.step - 1))
    table = kernel_diff([outside], [outside])
    assert table.rows[0][4] == pytest.approx(2 / 3)


def test_phases():
    a, b = run_of((10.0,) * 9).clock, run_of((20.0,) * 9).clock
    assert phase_diff(a, b).rows == (
        ("backward", 5.0, 10.0, 5.0),
        ("forward", 2.5, 5.0, 2.5),
    )
    empty = replace(a, phases={"forward": Samples((), "ms")})
    assert phase_diff(empty, empty) is None
