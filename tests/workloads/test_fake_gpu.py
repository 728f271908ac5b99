"""The CUDA path without a GPU: fake tensors run through every dispatch, eager and traced.

Shapes, dtypes and what torch.compile can trace are checked; values are not.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from steplab.kernels import attention as attention_op
from steplab.workloads.workload import find_workload

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="a CPU build of torch has no fake CUDA tensors"
)
CONFIGS = {
    "gpt": {"width": 128, "heads": 2, "context": 16, "layers": 2},
    "tsmoe": {"hidden_size": 128, "n_head": 2, "n_decoder_layers": 2, "seq_max_len": 72},
}


def batch_of(name, dtype):
    if name == "gpt":
        tokens = torch.zeros(2, 16, dtype=torch.long, device="cuda")
        return tokens, tokens
    known = torch.ones(2, 73, dtype=torch.bool, device="cuda")
    return torch.zeros(2, 73, device="cuda", dtype=dtype), known


def run_on_fake_gpu(name, dtype, compiled, monkeypatch, **impls):
    """Return what ran by op."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(attention_op.IMPLS["cudnn"], "HAS_CUDNN", True)
    entry = find_workload(name)
    workload = entry.open(entry.resolve("tiny", CONFIGS[name]))
    before = torch.get_default_dtype()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        torch.set_default_dtype(dtype)
        try:
            with torch.device("cuda"):
                model = workload.model()
        finally:
            torch.set_default_dtype(before)
        modules = [module for module in model.modules() if hasattr(module, "op")]
        for module in modules:
            module.impl = impls.get(module.op, "auto")
        if compiled:
            torch._dynamo.reset()
            model.compile(backend="eager", fullgraph=True)
        loss = workload.loss(model, batch_of(name, dtype)).loss
    assert loss.shape == () and loss.device.type == "cuda"
    return {module.op: module.ran for module in modules}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_auto_takes_the_fast_kernels_in_bf16(name, compiled, monkeypatch):
    ran = run_on_fake_gpu(name, torch.bfloat16, compiled, monkeypatch)
    assert ran["attention"] == "cudnn"
    if name == "tsmoe":
        assert (ran["experts"], ran["grouped_mm"]) == ("fused", "aten")
        assert (ran["router"], ran["feed_forward"]) == ("triton_router", "fused")
        assert (ran["rms_norm"], ran["rotary"]) == ("triton_norm", "triton_rotary")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_auto_in_fp32_says_what_it_must_do_without(name, compiled, monkeypatch):
    ran = run_on_fake_gpu(name, torch.float32, compiled, monkeypatch)
    assert ran["attention"] == "efficient"
    assert ran.get("grouped_mm", "loop") == "loop"


@pytest.mark.parametrize("impl", ["flash", "efficient", "cudnn", "math", "reference"])
def test_every_attention_can_be_asked_for(impl, monkeypatch):
    ran = run_on_fake_gpu("gpt", torch.bfloat16, True, monkeypatch, attention=impl)
    assert ran["attention"] == impl


def test_capacity_can_be_traced(monkeypatch):
    ran = run_on_fake_gpu("tsmoe", torch.bfloat16, True, monkeypatch, experts="capacity")
    assert ran["experts"] == "capacity"
