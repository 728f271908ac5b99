"""Blocks under torch.compile: traced whole, one graph for all that are alike, the same numbers."""

import pytest
import torch
from torch._dynamo.utils import counters

from tests.workloads.hydra.models import gradients, make, tokens

# mod, mor, and the graphs that serve 4 blocks: the first and the last have no token router.
STATIC = [
    ("dense", "fixed", 1, "eager"),
    ("dense", "threshold", 1, "eager"),
    ("top-k", "fixed", 2, "aot_eager"),
    ("soft", "soft", 2, "eager"),
    ("top-k", "masked", 2, "eager"),
    ("top-k", "capacity", 2, "aot_eager"),
]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


def second_gradients(model):
    """Return gradients after another step, which changes the running means that a loss uses."""
    model(tokens(seed=3), tokens(seed=4)).total.backward()
    return gradients(model)


@pytest.mark.slow
@pytest.mark.parametrize(("mod", "mor", "graphs", "backend"), STATIC)
def test_blocks_that_are_alike_share_one_graph(mod, mor, graphs, backend):
    forms = {"mod": mod, "mor": mor, "recursions": 2}
    model, expected = make(**forms), second_gradients(make(**forms))
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True, dynamic=False)
    found = second_gradients(model)
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-8, atol=1e-9, msg=name)
