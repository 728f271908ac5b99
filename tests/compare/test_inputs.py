from dataclasses import replace

import pytest

from steplab.compare.inputs import open_side
from steplab.core import Profile
from steplab.core.errors import UserError
from tests.compare.sides import run_of
from tests.trace.traces import kineto, op, range_, write_trace

EVENTS = [
    event
    for step in range(3)
    for event in (
        range_(f"ProfilerStep#{step}", step * 10_000, 10_000),
        op("aten::mm", step * 10_000 + 1_000, 5_000),
    )
]


def test_a_file_is_a_trace(tmp_path, store):
    path = write_trace(tmp_path / "t.json.gz", EVENTS)
    found = open_side(str(path), store)
    assert found.name == str(path) and found.run is None and found.timed is None
    assert found.profiled.values == pytest.approx((0.01, 0.01, 0.01))
    with pytest.raises(UserError, match=r"no file .*u.json"):
        open_side(str(tmp_path / "u.json"), store)


def test_a_run_comes_with_its_traces(store):
    plain, profile = run_of(name="20250101-plain"), Profile((0, 1, 3, 1), ("t.json",), "d.json")
    store.save(plain)
    text = kineto(EVENTS).encode()
    store.save(
        replace(plain, id="20250102-traced", profile=profile),
        {"t.json": text, "d.json": text},
    )
    assert open_side("plain", store).cycles == ()
    traced = open_side("20250102", store)
    assert traced.name == "20250102-traced" and len(traced.profiled) == 3
    assert traced.cycles[0].detail is not None
    with pytest.raises(UserError, match="no Run 'nowhere'"):
        open_side("nowhere", store)


def test_all_cycles_of_a_run_count(store):
    traces = {"t1.json": EVENTS[:2], "t2.json": EVENTS[2:]}
    run = replace(run_of(name="20250103-cycles"), profile=Profile((0, 0, 1, 2), (*traces,)))
    store.save(run, {name: kineto(events).encode() for name, events in traces.items()})
    found = open_side("20250103", store)
    assert [len(cycle.windows) for cycle in found.cycles] == [1, 2]
    assert len(found.profiled) == 3 and len(found.budget.steps) == 3
