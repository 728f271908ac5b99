"""Modules of torch's own classes are compiled, too: their `compile()` compiles nothing."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from steplab.core import RunSpec
from steplab.step.trial import trial
from steplab.techniques.compile import compile_module
from steplab.techniques.recipes import parse_recipe
from tests.own_models import named

OWN = """
import torch, steplab
from torch import nn

def factory(width: int = 8):
    def batches(size):
        while True:
            yield torch.randn(size, 4, width)

    layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 6), nn.Linear(width, width))
    return steplab.UserModel(model, batches, lambda m, x: m(x).square().mean())
"""

STAGES = """
import torch, steplab
from torch import nn

class Stages(nn.Module):
    def __init__(self):
        super().__init__()
        pairs = zip(range(8, 20), range(9, 21))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(*p), nn.Tanh()) for p in pairs)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def stages():
    def batches(size):
        while True:
            yield torch.randn(size, 8)

    return steplab.UserModel(Stages(), batches, lambda m, x: m(x).square().mean())
"""


@pytest.mark.parametrize("scope", ["whole", "blocks"])
def test_of_a_model_made_of_them(tmp_path, scope):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    recipe = parse_recipe(f"compile={scope},compile.backend=aot_eager")
    spec = RunSpec(
        named(f"{path}:factory"), {"width": 8}, batch=2, steps=2, warmup=1, recipe=recipe
    )
    run = trial(spec)
    assert run.status == "ok", run.reason
    assert run.compilation.graphs >= 1 and not run.compilation.breaks


def test_equal_blocks_share_a_graph_and_compute_the_same():
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(12))
    x = torch.randn(3, 8, requires_grad=True)

    def run():
        y = x
        for block in blocks:
            y = block(y)
        gradients = torch.autograd.grad(y.sum(), [x, *blocks.parameters()])
        return [y, *gradients]

    expected = run()
    for block in blocks:
        compile_module(block, backend="aot_eager", fullgraph=True, dynamic=False)
    for found, true in zip(run(), expected, strict=True):
        torch.testing.assert_close(found, true)
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_blocks_that_are_all_different(tmp_path):
    """Twelve graphs of one function: dynamo would stop at eight."""
    path = tmp_path / "own.py"
    path.write_text(STAGES)
    recipe = parse_recipe("compile=blocks,compile.backend=aot_eager")
    run = trial(RunSpec(named(f"{path}:stages"), {}, batch=2, steps=2, warmup=1, recipe=recipe))
    assert run.status == "ok", run.reason
    assert run.compilation.graphs >= 12 and not run.compilation.breaks


def test_what_is_generated_or_scripted_is_left_to_torch():
    x = torch.randn(3, 8)
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    expected = traced(x)
    compile_module(traced, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(traced(x), expected)
