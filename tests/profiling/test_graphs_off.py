"""The compiler is asked for no CUDA graphs, and only while the block lasts."""

import pytest
import torch
from torch import nn

from steplab.profiling.plan import ProfilePlan
from steplab.profiling.recorder import cuda_graphs_off, profile_spec
from tests.profiling.recorded import events


class Double(nn.Module):
    def forward(self, x):
        return x * 2


def test_inductor_is_asked_for_no_graphs(monkeypatch):
    asked = []

    def compile_fx(graph, inputs, config_patches, **others):
        asked.append(config_patches.get("triton.cudagraphs"))
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    torch._dynamo.reset()
    model = Double()
    model.compile(mode="reduce-overhead")
    x = torch.ones(1, 2)
    model(x)
    with cuda_graphs_off():
        model(x)
    model(x)
    assert asked == [True, False, True]
    torch._dynamo.reset()


def test_the_compiler_is_put_back_after_a_failure():
    original = torch._TorchCompileInductorWrapper.__call__
    with pytest.raises(ZeroDivisionError), cuda_graphs_off():
        _ = 1 / 0
    assert torch._TorchCompileInductorWrapper.__call__ is original


@pytest.mark.gpu
def test_gpu_detail_has_a_launch_for_every_kernel(tiny_spec, tmp_path):
    recipe = "precision=bf16,compile=blocks,compile.mode=reduce-overhead"
    spec = tiny_spec(recipe, device="cuda", config={"width": 128})
    run = profile_spec(spec, ProfilePlan((0, 1, 1, 1)), tmp_path, lambda text: None)
    assert run.status == "ok", run.reason

    def names(file, category):
        return sorted(e["name"] for e in events(tmp_path / file) if e.get("cat") == category)

    lean, detail = names("trace_1.json.gz", "kernel"), names("detail.json.gz", "kernel")
    assert "cudaGraphLaunch" in names("trace_1.json.gz", "cuda_runtime")
    assert "cudaGraphLaunch" not in names("detail.json.gz", "cuda_runtime")
    fused = [name for name in lean if name.startswith("triton_")]
    assert fused and fused == [name for name in detail if name.startswith("triton_")]
