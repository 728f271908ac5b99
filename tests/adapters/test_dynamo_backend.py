"""`backend="steplab"` of torch.compile, by the entry point that pyproject.toml declares."""

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends import registry

from steplab.adapters.dynamo_backend import substituting_backend

GROUP = "torch_dynamo_backends"


@pytest.fixture
def declared(monkeypatch):
    """Let torch find what is declared, also where another version is installed."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    value = project["entry-points"][GROUP]["steplab"]
    registry._lazy_import()
    monkeypatch.setitem(registry._BACKENDS, "steplab", EntryPoint("steplab", value, GROUP))
    substituting_backend().before("aot_eager")
    yield
    substituting_backend().before("inductor")
    registry._COMPILER_FNS.pop("steplab", None)
    torch.compiler.reset()


def test_torch_compile_finds_the_backend_and_substitutes(declared):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 8, 4, requires_grad=True) for _ in range(3))

    def attend(q, k, v):
        mask = torch.ones(8, 8, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).square().mean()

    before = len(substituting_backend().graphs)
    compiled = torch.compile(attend, backend="steplab")
    found, expected = compiled(q, k, v), attend(q, k, v)
    torch.testing.assert_close(found, expected)
    mine, theirs = (torch.autograd.grad(loss, (q, k, v)) for loss in (found, expected))
    for one, two in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, two)
    (compiled_here,) = substituting_backend().graphs[before:]
    assert "is_causal" in [one.what for one in compiled_here]
