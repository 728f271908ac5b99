"""The running line of every operator, pause and generator, on the profiler's own clock."""

import os
import sys
from pathlib import Path

import pytest
import torch
from torch.autograd import profiler as legacy
from torch.profiler import ProfilerActivity, profile

from steplab.probes import line_ranges as module
from steplab.probes.line_ranges import line_ranges
from steplab.trace.analyze import analyze
from steplab.trace.lines import LINE_RANGE, shown_path
from steplab.trace.load import load_trace

CODE = """\
import torch

def batches():
    while True:
        batch = torch.ones(4, 4)
        yield batch

feed = batches()
weight = torch.ones(4, 4, requires_grad=True)

def refuse(x):
    raise ValueError(x)

def step():
    x = next(feed)
    y = (
        x @
        weight
    )
    for turn in range(3):
        y = y.exp(); y = y.neg()
    try:
        refuse(y.tanh())
    except ValueError:
        y = y.sin()
    y.sum().backward()

def smooth(x):
    y = x.exp()
    return y.neg()
"""


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """A file of a user in the current folder, and its functions."""
    monkeypatch.chdir(tmp_path)
    Path("own").mkdir()
    path = tmp_path / "own" / "loop.py"
    path.write_text(CODE)
    names = {}
    exec(compile(CODE, str(path), "exec"), names)
    return names


def lines_of(function, tmp_path):
    """Return the lines of each operator by name, from a trace that was written and read."""
    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as profiler, line_ranges():
        function()
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    trace = load_trace(path)
    work = analyze(trace).work
    found = {}
    for name, line in zip(work.name, work.line, strict=True):
        found.setdefault(work.labels[name], set()).add(work.labels[line])
    return found, trace


def test_operators_have_the_line_that_calls_them(theirs, tmp_path):
    found, trace = lines_of(theirs["step"], tmp_path)
    where = {
        "aten::ones": "own/loop.py:5 (batches)",
        "aten::matmul": "own/loop.py:17 (step)",
        "aten::exp": "own/loop.py:21 (step)",
        "aten::tanh": "own/loop.py:23 (step)",
        "aten::sin": "own/loop.py:25 (step)",
    }
    assert {op: found[op] for op in where} == {op: {line} for op, line in where.items()}
    assert found["aten::cos"] == {"own/loop.py:25 (step)"}, "the backward of sin"
    assert not any(name.startswith(LINE_RANGE) for name in found), "lines are no operators"
    assert len(trace.lines) > 10


def test_a_thread_without_lines_shows_where_its_functions_begin(theirs, tmp_path):
    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as profiler:
        theirs["step"]()
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    work = analyze(load_trace(path)).work
    assert {work.labels[code] for code in work.line} >= {"own/loop.py:14 (step)"}
    assert (work.line == work.function).all()


def test_a_line_that_runs_very_often_stays_in_its_range(theirs, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_RANGES", 1)
    found, _ = lines_of(theirs["step"], tmp_path)
    assert found["aten::exp"] <= {"own/loop.py:20 (step)", "own/loop.py:21 (step)"}
    assert found["aten::sin"] == {"own/loop.py:25 (step)"}, "the loop has ended"


def test_libraries_have_no_lines_and_a_tracer_of_the_user_comes_back(theirs):
    def tracer(frame, event, arg):
        return None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        with legacy.profile() as profiler, line_ranges():
            torch.nn.functional.gelu(torch.ones(2))
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
    assert not [e for e in profiler.function_events if e.name.startswith(f"{LINE_RANGE}torch")]


def test_an_error_leaves_the_range_and_the_tracer(theirs):
    before = sys.gettrace()
    with pytest.raises(ValueError, match="3"), legacy.profile(), line_ranges():
        theirs["refuse"](3)
    assert sys.gettrace() is before


def test_the_compiler_does_not_see_the_tracer(theirs):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(theirs["smooth"], backend=backend, fullgraph=True)
    x = torch.ones(3)
    compiled(x)
    with legacy.profile(), line_ranges():
        assert torch.equal(compiled(x), -x.exp())
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_paths_are_relative_to_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", ["/lib/a", "/lib/a/b", ""])
    monkeypatch.chdir(tmp_path)
    assert shown_path(f"{tmp_path}/own/loop.py") == "own/loop.py"
    assert shown_path("/lib/a/b/c/d.py") == "c/d.py"
    assert shown_path("/home/me/project/model.py") == "project/model.py"
    assert shown_path("package/deep/model.py") == "package/deep/model.py"
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    os.rmdir(gone)
    assert shown_path("/home/me/project/model.py") == "project/model.py"
