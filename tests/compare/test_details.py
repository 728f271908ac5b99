from dataclasses import replace

from steplab.compare.step_tables import compilation_table, phase_table, utilization_table
from steplab.core import Compilation, Counters, Figures, Recompile, Samples
from tests.compare.test_step_tables import cells, make_run


def test_phases_and_waits_are_told_and_unknown_columns_left_out():
    run = make_run()
    clock = replace(run.clock, phases={"forward": Samples((4.0,), "ms")})
    row = cells(phase_table([replace(run, clock=clock)]))[0]
    assert row["forward [ms]"] == 4.0 and row["limit"] == "cpu"
    assert "kernel launches" not in row
    assert phase_table([make_run(status="oom")]) is None


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
    assert row["power [W]"] == 610 and "HBM bandwidth [%]" not in row
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
