import pytest

from steplab.core.errors import UserError
from steplab.trace.analyze import analyze
from steplab.trace.kernel_table import kernel_table, phases_by_time, short_kernel_name
from tests.trace.traces import AUTOGRAD, call, kernel, launched, op, range_, trace_of

NODE = "autograd::engine::evaluate_function: MmBackward0"


@pytest.fixture(scope="module")
def analysis():
    """Two steps; in each two products and a copy forward, one product backward; one stray."""
    events = []
    for step in range(2):
        at, first = 10_000 * step, 10 * step + 1
        events += [
            range_(f"ProfilerStep#{step}", at, 9_000),
            range_("forward", at, 1_000),
            range_("module:blocks.1.mlp", at, 300),
            range_("module:blocks.10", at + 400, 300),
            range_("backward", at + 2_000, 1_000),
            op(NODE, at + 2_100, 500, AUTOGRAD),
            *launched("nvjet_tst_64x64_TNN", at + 100, at + 110, at + 5_000, 1_000, first),
            *launched("nvjet_tst_64x64_TNN", at + 450, at + 460, at + 6_000, 3_000, first + 1),
            *launched("direct_copy_kernel", at + 800, at + 810, at + 9_000, 500, first + 2),
            call("cudaLaunchKernel", at + 2_200, 10, first + 3, AUTOGRAD),
            kernel("nvjet_hsh_64x64_TNN", at + 9_500, 1_500, first + 3),
        ]
    events += launched("stray", 9_500, 9_510, 50_000, 7_777, 90)
    return analyze(trace_of(events))


def cells(table, *names: str) -> list[tuple]:
    index = [[column.title for column in table.columns].index(name) for name in names]
    return [tuple(row[i] for i in index) for row in table.rows]


def test_kernels_of_all_steps_most_time_first(analysis):
    table = kernel_table(analysis)
    found = cells(table, "Name", "Total [ms]", "Instances", "Per step", "Time [%]")
    assert found == [
        ("nvjet_tst_64x64_TNN", pytest.approx(8e-3), 4, 2.0, pytest.approx(800 / 12)),
        ("nvjet_hsh_64x64_TNN", pytest.approx(3e-3), 2, 1.0, pytest.approx(300 / 12)),
        ("direct_copy_kernel", pytest.approx(1e-3), 2, 1.0, pytest.approx(100 / 12)),
    ]
    spread = cells(table, "Avg [us]", "Med [us]", "Min [us]", "Max [us]", "StdDev [us]")
    assert spread[0] == (2.0, 2.0, 1.0, 3.0, pytest.approx(1.1547, abs=1e-4))
    assert table.title == "kernels, 2 steps"


def test_one_phase_one_module_or_one_range(analysis):
    def names(**chosen: str) -> list[tuple]:
        return cells(kernel_table(analysis, **chosen), "Name", "Instances")

    forward = [("nvjet_tst_64x64_TNN", 4), ("direct_copy_kernel", 2)]
    assert names(phase="forward") == names(range_name="forward") == forward
    backward = [("nvjet_hsh_64x64_TNN", 2)]
    assert names(phase="backward") == names(range_name="backward") == backward
    assert names(module="blocks.1") == names(module="blocks.1.mlp") == [("nvjet_tst_64x64_TNN", 2)]
    assert names(range_name="module:blocks.10") == [("nvjet_tst_64x64_TNN", 2)]
    assert phases_by_time(analysis) == ("forward", "backward")


def test_what_is_not_there_is_an_error_with_a_suggestion(analysis):
    with pytest.raises(UserError, match=r"no phase 'foward'.*'forward'"):
        kernel_table(analysis, phase="foward")
    with pytest.raises(UserError, match="no range 'x'"):
        kernel_table(analysis, range_name="x")
    with pytest.raises(UserError, match=r"no module 'blocks\.2'"):
        kernel_table(analysis, module="blocks.2")


def test_the_rest_beyond_the_top_is_one_row(analysis):
    table = kernel_table(analysis, top=1)
    rows = cells(table, "Name", "Instances", "Max [us]")
    assert rows[1:] == [("(2 others)", 4, 1.5)]
    assert sum(share for (share,) in cells(table, "Time [%]")) == pytest.approx(100)


def test_a_table_of_nothing_has_no_rows():
    assert kernel_table(analyze(trace_of([range_("forward", 0, 100)]))).rows == ()


def test_names_are_shortened_for_people():
    copy = (
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<2u>>"
        "(at::native::OpaqueType<2u>*, int)"
    )
    assert short_kernel_name(copy) == "CatArrayBatchedCopy<OpaqueType<2u>>"
    assert short_kernel_name("nvjet_tst_64x64_TNN") == "nvjet_tst_64x64_TNN"
    assert len(short_kernel_name("k" * 500)) == 110
    short = short_kernel_name("begins_alike_" + "x" * 500 + "_ends_otherwise", 40)
    assert len(short) == 40 and short.startswith("begins_") and short.endswith("otherwise")
