"""The large files of benchmarks/trace_speed.py: many steps, each with all of its work."""

import sys
from pathlib import Path

import numpy as np

from steplab.trace.analyze import analyze
from steplab.trace.load import load_trace

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_a_larger_file_has_more_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    from trace_files import record_sample, write_trace_file

    sample, path = record_sample(), tmp_path / "trace.json"
    steps = {}
    for megabytes in (1, 30):
        events = write_trace_file(path, megabytes, sample)
        analysis = analyze(load_trace(path))
        steps[megabytes] = len(analysis.windows)
        assert events == steps[megabytes] * (sample.events + 1)
        kernels = np.bincount(analysis.work.step)
        assert len(kernels) == steps[megabytes] and set(kernels.tolist()) == {kernels[0]}
    assert steps[1] == 1 and steps[30] > 3
