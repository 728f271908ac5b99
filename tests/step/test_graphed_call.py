"""The machine around a capture, with a stand-in for CUDA: what is captured, copied, refused."""

from collections import namedtuple

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from steplab.core.errors import Unsupported, UserError
from steplab.step.graph import GraphedModule, capture_example, graph
from steplab.step.graphed_call import GraphedCall, StaticInputs, refused_capture, refused_sync
from steplab.trace.user_frames import error_line
from tests.step.fake_graphs import FakeGraphs

CPU = torch.device("cpu")
Batch = namedtuple("Batch", "values mask")


def double(inputs):
    values, options = inputs
    return {"out": values["x"] * 2 + options, "first": values["pair"].mask.sum()}


def batch(seed=0, rows=3, options=1):
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))
    return {"x": x, "pair": Batch(x, x > 0)}, options


def test_warm_up_capture_replay():
    graphs = FakeGraphs(CPU)
    call = GraphedCall(double, graphs, warmup=3)
    outputs = [call(batch(seed)) for seed in range(6)]
    assert graphs.warmed == [False, False, True], "the last plain call is the strict one"
    assert graphs.captures == 1 and graphs.replays == 3
    for seed, output in enumerate(outputs):
        # Compared only now: a later call must not have overwritten what was returned.
        assert torch.equal(output["out"], double(batch(seed))["out"])
        assert torch.equal(output["first"], double(batch(seed))["first"])


def test_the_captured_function_sees_buffers_and_never_the_callers_tensors():
    seen = []
    call = GraphedCall(
        lambda inputs: seen.append(inputs[0]["x"]) or double(inputs), FakeGraphs(CPU), 1
    )
    given = [batch(seed) for seed in range(4)]
    for one in given:
        call(one)
    assert len({x.data_ptr() for x in seen[1:]}) == 1
    assert seen[1].data_ptr() not in {one[0]["x"].data_ptr() for one in given}


def test_buffers_keep_the_strides_of_what_they_stand_for():
    whole = torch.arange(12.0).view(3, 4)
    given = (whole[:, 1:], whole.T, whole[:, ::2], whole[:1].expand(3, 4), torch.tensor(1.0))
    buffers = StaticInputs(given, CPU).values
    for buffer, one in zip(buffers, given, strict=True):
        assert torch.equal(buffer, one) and buffer.data_ptr() != one.data_ptr()
        assert buffer.stride() == one.stride() or one is given[3], (
            "nobody writes to an expanded one"
        )


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (batch(rows=5), r"input \[0\]\['x'\] was \(3, 4\) float32 and is \(5, 4\) float32"),
        (({**batch()[0], "x": batch()[0]["x"].double()}, 1), "is .3, 4. float64"),
        (batch(options=2), r"input \[1\] was 1 and is 2"),
        (({"x": batch()[0]["x"]}, 1), "4 inputs were captured, 2 came"),
        (({"y": batch()[0]["x"], "pair": batch()[0]["pair"]}, 1), "another way"),
    ],
)
def test_other_shapes_are_refused_by_name(other, words):
    call = GraphedCall(lambda inputs: inputs[0]["x"] * 1, FakeGraphs(CPU), 1)
    call(batch())
    call(batch())
    with pytest.raises(Unsupported, match=words):
        call(other)
    assert torch.equal(call(batch(7)), batch(7)[0]["x"]), "the graph is as good as before"


def test_inputs_that_cannot_be_replaced_are_refused():
    class Sample:
        x = torch.ones(2)

    call = GraphedCall(lambda inputs: inputs[0].x * 1, FakeGraphs(CPU), 1)
    call([Sample()])
    with pytest.raises(Unsupported, match=r"Input \[0\] is a Sample"):
        call([Sample()])
    elsewhere = GraphedCall(lambda inputs: inputs[0] * 1, FakeGraphs(torch.device("cuda")), 1)
    elsewhere([torch.ones(2)])
    with pytest.raises(Unsupported, match="is on cpu"):
        elsewhere([torch.ones(2)])


def test_values_of_python_that_change_are_refused():
    rate = {"lr": 0.1}
    call = GraphedCall(lambda x: x * rate["lr"], FakeGraphs(CPU), 1, lambda: dict(rate))
    for _ in range(3):
        call(torch.ones(1))
    rate["lr"] = 0.2
    with pytest.raises(Unsupported, match=r"lr was 0.1 when the CUDA graph was captured"):
        call(torch.ones(1))


def test_code_compiled_anew_is_captured_anew(monkeypatch):
    graphs = FakeGraphs(CPU)
    call = GraphedCall(double, graphs, warmup=2)
    for _ in range(4):
        call(batch())
    monkeypatch.setitem(counters["stats"], "unique_graphs", counters["stats"]["unique_graphs"] + 1)
    for _ in range(4):
        call(batch())
    assert graphs.captures == 2 and graphs.warmed == [False, True, False, True]


def test_a_module_for_inference():
    module = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)).eval()
    graphs = FakeGraphs(CPU)
    fast = capture_example(GraphedModule(module, graphs), (torch.randn(3, 4),))
    assert graphs.captures == 1
    first, second = torch.randn(3, 4), torch.randn(3, 4)
    outputs = fast(first), fast(second)
    assert not outputs[0].requires_grad
    assert torch.equal(outputs[0], module(first)) and torch.equal(outputs[1], module(second))
    with torch.no_grad():
        module[0].weight.mul_(2)
    assert torch.equal(fast(first), module(first)), "weights changed in place are seen"
    module.train()
    with pytest.raises(Unsupported, match="training mode was False"):
        fast(first)


def test_inference_is_refused_where_it_cannot_be():
    module = nn.Linear(2, 2).eval()
    with pytest.raises(Unsupported, match="need a CUDA GPU, but the inputs are on cpu"):
        graph(module, (torch.ones(1, 2),))
    with pytest.raises(UserError, match="Give a tuple"):
        graph(module, torch.ones(1, 2))
    with pytest.raises(UserError, match="holds no tensor"):
        graph(module, ())
    with pytest.raises(UserError, match="eval"):
        graph(nn.Linear(2, 2), (torch.ones(1, 2),))


def own_model_waits():
    raise RuntimeError("called a synchronizing CUDA operation")


def test_refusals_name_the_line():
    try:
        own_model_waits()
    except RuntimeError as error:
        refusal = refused_sync(error)
        line = own_model_waits.__code__.co_firstlineno + 1
        assert f"step/test_graphed_call.py:{line} (own_model_waits)" in str(refusal)


def test_of_several_errors_in_a_capture_the_first_is_told():
    try:
        try:
            raise RuntimeError("operation not permitted when stream is capturing. More words.")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")
    except RuntimeError as error:
        said = str(refused_capture(error))
        assert "not permitted when stream is capturing (" in said and "previous" not in said
        assert "test_graphed_call.py" in error_line(error)


def test_out_of_memory_stays_what_it_is():
    error = torch.OutOfMemoryError("CUDA out of memory")
    assert refused_capture(error) is error
