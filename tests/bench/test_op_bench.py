"""An op benchmark is declared once: cells and flags come from its axes."""

from typing import Literal

import pytest

from steplab.bench.op_bench import OpAxis, OpBench, dtype_axis, impl_axis
from steplab.cli.command import Parser
from steplab.cli.op_bench import op_command
from steplab.core import RunSpec
from steplab.core.errors import UserError

BENCH = OpBench(
    name="norm",
    kernel="rms_norm",
    axes=(
        OpAxis("rows", "number of rows", gpu=[4096], cpu=[16, 32], minimum=2),
        OpAxis("mode", "how", gpu=["a"], cpu=["a"], kind=Literal["a", "b"]),
        OpAxis("bias", "with a bias", gpu=[True], cpu=[True], kind=bool),
        dtype_axis(),
        impl_axis(gpu=["reference"], cpu=["reference"]),
    ),
    build=lambda config, seed, device: None,
    size="R{rows} {dtype} {impl}",
    results=("out", "dx"),
    flops=lambda config: (config["rows"], 2 * config["rows"]),
    flops_note="one per row",
    x_axis="rows",
)


def cells(device="cpu", **asked):
    return BENCH.cells(asked, RunSpec("norm", device=device, steps=3), seconds=0.5)


def test_axes_that_are_not_given_take_the_defaults_of_the_device():
    assert [spec.config["rows"] for spec in cells()] == [16, 32]
    (spec,) = cells("cuda")
    assert spec.config == {
        "rows": 4096,
        "mode": "a",
        "bias": True,
        "dtype": "bf16",
        "impl": "reference",
        "seconds": 0.5,
    }
    assert spec.size == "R4096 bf16 reference" and spec.steps == 3


def test_dtypes_come_outermost_and_a_value_given_twice_is_one_cell():
    found = cells(rows=[8, 4, 8], dtype=["bf16", "fp32"], mode=["b"])
    order = [(spec.config["dtype"], spec.config["rows"]) for spec in found]
    assert order == [("bf16", 8), ("bf16", 4), ("fp32", 8), ("fp32", 4)]
    assert BENCH.shape_text(found[0].config) == "rows 8, b, bias, bf16"
    assert BENCH.variant_text(found[0].config) == "reference"


def test_values_below_the_minimum_are_refused():
    with pytest.raises(UserError, match="--rows must be at least 2, not 1"):
        cells(rows=[4, 1])


def test_flags_are_made_from_the_axes(capsys):
    parser = Parser("steplab bench norm", "Time a norm.")
    op_command(BENCH).flags(parser, [])
    args = parser.parse("--rows 4 8 --no-bias --dtype fp32 bf16".split())
    assert (args.axis_rows, args.axis_bias, args.axis_dtype) == ([4, 8], False, ["fp32", "bf16"])
    assert not hasattr(args, "axis_mode")
    with pytest.raises(UserError, match="--mode"):
        parser.parse(["--mode", "c"])
    shown = " ".join(parser.format_help().split())
    assert "number of rows (default: 4096 on a GPU, 16 32 on a CPU)" in shown
    assert "how (default: a)" in shown and "reference" in shown
