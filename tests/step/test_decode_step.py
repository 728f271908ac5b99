"""A replayed step of decoding has the bits of the same step run op by op."""

import warnings
from contextlib import nullcontext

import pytest
import torch

from steplab.core.errors import Unsupported
from steplab.step import graphed_call
from steplab.step.decode_step import DecodeStep, graphs_on
from tests.step.tape_graphs import TapeGraphs

CPU = torch.device("cpu")


class WatchingTape(TapeGraphs):
    waits = ""

    def watch(self, run):
        return self.warm(run, False), self.waits


class Counter:
    """A step whose state is a tensor: how often it was made, and the sum of what it was given."""

    def __init__(self):
        self.state = torch.zeros(2)

    def __call__(self, x):
        self.state += torch.stack([torch.ones(()), x])
        return self.state * 2


def test_every_call_is_one_step_whether_run_or_replayed():
    counter, graphs = Counter(), WatchingTape(CPU)
    step = DecodeStep(counter, graphs)
    given = (3.0, 5.0, 7.0, 11.0)
    found = [step(torch.tensor(x)) for x in given]
    assert [x.tolist() for x in found] == [[2, 6], [4, 16], [6, 30], [8, 52]]
    assert (graphs.warmed, graphs.captures, graphs.replays) == (1, 1, 3)
    assert counter.state.tolist() == [4, 26] and not step.why_not


def test_a_step_that_waits_for_the_device_is_never_captured():
    counter, graphs = Counter(), WatchingTape(CPU)
    graphs.waits, told = "model.py:7", []
    step = DecodeStep(counter, graphs, told.append)
    assert [step(torch.tensor(1.0)).tolist() for _ in range(3)] == [[2, 2], [4, 4], [6, 6]]
    assert graphs.captures == 0 and "at model.py:7" in step.why_not
    (note,) = told
    assert "runs op by op: the host waits for the device at model.py:7." in note


def test_a_capture_that_fails_costs_no_step(monkeypatch):
    def fail(run):
        raise Unsupported("No CUDA graph: something.")

    counter, graphs = Counter(), WatchingTape(CPU)
    monkeypatch.setattr(graphs, "capture", fail)
    told = []
    step = DecodeStep(counter, graphs, told.append)
    assert [step(torch.tensor(1.0)).tolist() for _ in range(3)] == [[2, 2], [4, 4], [6, 6]]
    assert "something" in step.why_not and [step.why_not in note for note in told] == [True]


def test_inputs_of_another_shape_are_refused():
    step = DecodeStep(lambda x: x + 1, WatchingTape(CPU))
    for _ in range(3):
        step(torch.zeros(2))
    with pytest.raises(Unsupported, match="fixed shapes"):
        step(torch.zeros(3))


def test_without_a_gpu_nothing_captures():
    assert graphs_on(CPU) is None
    counter = Counter()
    told = []
    step = DecodeStep(counter, None, told.append)
    assert step(torch.tensor(1.0)).tolist() == [2, 2] and not told  # as was to be expected


def test_a_watched_call_tells_its_first_wait_and_passes_other_warnings_on(monkeypatch):
    monkeypatch.setattr(graphed_call, "sync_debug_mode", lambda mode: nullcontext())
    graphs = object.__new__(graphed_call.CudaGraphs)
    monkeypatch.setattr(graphs, "warm", lambda run, strict: run(), raising=False)

    def waits():
        for _ in range(2):
            warnings.warn(graphed_call.SYNC_MESSAGE, stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        return 7

    with pytest.warns(UserWarning, match="something else") as told:
        out, where = graphs.watch(waits)
    assert out == 7 and "test_decode_step.py:" in where and len(told) == 1
    assert graphs.watch(lambda: 8) == (8, "")


@pytest.mark.gpu
def test_gpu_a_wait_is_found_with_its_line():
    state = torch.zeros(1, device="cuda")

    def waits():
        state.add_(1)
        return state * float(state)

    step = DecodeStep(waits, graphs_on(state.device))
    assert [float(step()) for _ in range(3)] == [1, 4, 9]
    assert "test_decode_step.py" in step.why_not
