from dataclasses import replace

import pytest

from steplab.compare.scaling import scaling_table
from steplab.compare.step_tables import (
    compilation_table,
    numeric_axes,
    phase_table,
    step_table,
    utilization_table,
)
from steplab.compare.versus import versus_table
from steplab.core import (
    Clock,
    Compilation,
    Counters,
    Environment,
    Figures,
    Memory,
    Ran,
    Recompile,
    Run,
    RunSpec,
    Samples,
    Work,
    new_run_id,
)

ENVIRONMENT = Environment("0.1.0", "3.11", "Linux", "A CPU", 2, None, torch="2.13")


def make_run(context=128, ms=10.0, flops=1e9, size="tiny", status="ok", **changes) -> Run:
    spec = RunSpec("gpt", {"context": context, "width": 64}, size, **changes)
    if status != "ok":
        return Run(new_run_id(spec), spec, ENVIRONMENT, status, "CUDA out of memory")
    steps = Samples((ms, ms, ms), "ms")
    return Run(
        new_run_id(spec),
        spec,
        ENVIRONMENT,
        clock=Clock(steps, steps, Samples((), "ms"), {}, {}, 3 * ms, "perf_counter"),
        memory=Memory(0, 2**30, None, None, "process resident set"),
        work=Work(4 * context, flops, flops, flops, formula="6 x N"),
        ran=Ran({"attention": ("flash",)}),
    )


def cells(table):
    return [dict(zip([c.title for c in table.columns], row, strict=True)) for row in table.rows]


def test_rows_say_what_was_measured():
    table = step_table([make_run()], "gpt")
    row = cells(table)[0]
    assert row["step median [ms]"] == 10.0 and row["tokens/s"] == 51_200
    assert row["peak memory [GiB]"] == 1.0 and row["status"] == "ok"
    assert table.title == "gpt: tiny, context 128, batch 4, full"
    assert "ran: attention=flash" in table.note and "MFU [%]" not in row


def test_failed_cells_stay_visible():
    table = step_table([make_run(), make_run(context=512, status="oom")])
    assert cells(table)[1]["status"] == "oom: CUDA out of memory"


def test_only_what_varies_within_a_size_is_an_axis():
    runs = [make_run(), make_run(context=256)]
    assert [c.title for c in step_table(runs).columns][:2] == ["context", "step median [ms]"]
    assert numeric_axes(runs) == ["context"]
    assert numeric_axes([make_run(), make_run(batch=8)]) == ["batch"]


def test_scaling_tells_the_fixed_cost_from_the_rate():
    """time = 5 ms + FLOPs / (0.2 TFLOP/s): the fit must find both, the exponent is below 1."""
    runs = [
        make_run(context=n, flops=n * 1e7, ms=5 + n * 1e7 / 0.2e12 * 1e3) for n in (128, 256, 512)
    ]
    rows = cells(scaling_table(runs, "context"))
    assert len(rows) == 2
    assert rows[0]["fixed cost [ms]"] == pytest.approx(5)
    assert rows[0]["marginal rate [TFLOP/s]"] == pytest.approx(0.2)
    assert 0 < rows[0]["local exponent"] < rows[1]["local exponent"] < 1
    squared = cells(scaling_table([make_run(128, 2.0), make_run(512, 32.0)], "context"))
    assert squared[0]["local exponent"] == pytest.approx(2.0)


def test_steps_that_wait_for_the_host_have_no_rate():
    """On a GPU that idles, a fit of time against FLOPs gave rates above the card's peak."""

    def run(context, ms):
        run = make_run(context, ms, flops=context * 1e7)
        clock = replace(run.clock, source="cuda events", data_wait=Samples((0.0,), "ms"))
        return replace(run, clock=clock, ran=Ran(device_busy_ms=2.0))

    rows = cells(scaling_table([run(128, 10.0), run(256, 10.1), run(512, 10.2)], "context"))
    assert {row["marginal rate [TFLOP/s]"] for row in rows} == {None}


def test_failed_cells_do_not_enter_the_scaling():
    runs = [make_run(128), make_run(256, status="oom"), make_run(512)]
    assert len(scaling_table(runs, "context").rows) == 1
    assert scaling_table([make_run(128)], "context") is None


def test_phases_and_waits_are_told_and_unknown_columns_left_out():
    run = make_run()
    clock = replace(run.clock, phases={"forward": Samples((4.0,), "ms")})
    row = cells(phase_table([replace(run, clock=clock)]))[0]
    assert row["forward [ms]"] == 4.0 and row["limit"] == "cpu"
    assert "kernel launches" not in row
    assert phase_table([make_run(status="oom")]) is None


def test_the_phases_of_a_step_add_up():
    """Medians of every phase added up to 104 % of the median step."""
    run = make_run()
    phases = {"forward": (6.0, 3.0, 7.0), "backward": (3.0, 8.0, 5.0)}
    clock = replace(
        run.clock,
        step=Samples((10.0, 11.5, 12.5), "ms"),
        phases={name: Samples(values, "ms") for name, values in phases.items()},
    )
    table = phase_table([replace(run, clock=clock)])
    row = cells(table)[0]
    assert row["step [ms]"] == 11.5 and row["forward [ms]"] == 3.0 and row["other [ms]"] == 0.5
    assert not any(line.endswith(";") for line in table.note.splitlines())


def test_the_median_is_the_same_in_every_table():
    """Of 4 steps the mean of the middle two stood above the phases of one of them."""
    run = make_run()
    run = replace(run, clock=replace(run.clock, step=Samples((3.0, 20.0, 2.0, 18.0), "ms")))
    assert cells(step_table([run]))[0]["step median [ms]"] == 3.0
    assert cells(phase_table([run]))[0]["step [ms]"] == 3.0


def differing_in(field, *values):
    """Return Runs that differ in a field of the config alone."""
    runs = []
    for value in values:
        run = make_run()
        spec = replace(run.spec, config={**run.spec.config, field: value}, overrides=("width",))
        work = replace(run.work, formula=f"6 x {len(str(value))}")
        runs.append(replace(run, spec=spec, work=work))
    return runs


def test_rows_and_formulas_are_named_by_what_differs():
    runs = differing_in("mod", "dense", "top-k-2")
    table = step_table(runs, "hydra")
    assert [row["mod"] for row in cells(table)] == ["dense", "top-k-2"]
    assert "FLOPs, full, mod dense: 6 x 5" in table.note
    assert "FLOPs, full, mod top-k-2: 6 x 7" in table.note
    # An override of the size that all share stands in the title.
    assert table.title == "hydra: tiny, width 64, context 128, batch 4, full"


def test_two_that_were_measured_in_turns_are_named_by_what_differs():
    first, second = (run.spec for run in differing_in("mod", "dense", "top-k"))
    rounds = [Samples((1.0, 2.0), "ms")] * 2
    table = versus_table(first, rounds, second, rounds, "here")
    assert [row["mod"] for row in cells(table)] == ["dense", "top-k"]
    assert "recipe" not in cells(table)[0] and "width 64" in table.title
    assert "2 rounds; a verdict needs 6 rounds or more" in table.note
    assert "needs" not in versus_table(first, rounds * 3, second, rounds * 3, "here").note


def test_limits():
    """The device is the limit when its kernels fill the step, whatever the host's time says."""
    run = make_run()

    def limit(busy, wait=0.0, source="cuda events"):
        clock = replace(run.clock, source=source, data_wait=Samples((wait,), "ms"))
        ran = replace(run.ran, device_busy_ms=busy)
        return cells(phase_table([replace(run, clock=clock, ran=ran)]))[0]["limit"]

    assert limit(9.5) == limit(9.5, wait=1.0) == "device"
    assert limit(4.0) == "host" and limit(4.0, wait=2.0) == "data"
    assert limit(None) == "unknown"
    assert limit(None, source="perf_counter") == "cpu"
    assert limit(None, wait=2.0, source="perf_counter") == "data"


def test_figures_and_counters_stand_side_by_side():
    figures = Figures(0.4, 0.45, 0.5, 989.4, "datasheet")
    counters = Counters(power_w=Samples((600.0, 620.0), "W"))
    row = cells(utilization_table([replace(make_run(), figures=figures, counters=counters)]))[0]
    assert (row["MFU [%]"], row["MFU PaLM [%]"], row["HFU [%]"]) == (40.0, 45.0, 50.0)
    assert row["power [W]"] == 600 and "HBM bandwidth [%]" not in row
    assert utilization_table([make_run()]) is None


def test_compilation_names_its_reasons():
    compiled = Compilation(2, 0, {"print": 1}, (Recompile("forward", "shape 8 != 4"),), 20.0, 0, 2)
    table = compilation_table([replace(make_run(), compilation=compiled)])
    row = cells(table)[0]
    assert (row["graphs"], row["breaks"], row["recompiles"], row["cold [s]"]) == (2, 1, 1, 20.0)
    assert "print" in table.note and "shape 8 != 4" in table.note
    warm = replace(compiled, cache_hits=1)
    assert cells(compilation_table([replace(make_run(), compilation=warm)]))[0]["cold [s]"] is None
    assert compilation_table([make_run()]) is None
