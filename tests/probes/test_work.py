"""Our FLOP formulas against torch's own counter and against arithmetic."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from steplab.probes.work import Counter


def count(run, visible=True):
    with Counter(visible) as counter:
        run()
    return counter


@pytest.mark.parametrize("causal", [False, True])
def test_cpu_attention_is_counted(causal):
    """torch counts CPU attention as 0. B2 H3 T8 D4: 64 pairs, 36 of them visible when causal."""
    q, k, v = torch.randn(3, 2, 3, 8, 4, requires_grad=True)
    out = []
    forward = count(lambda: out.append(F.scaled_dot_product_attention(q, k, v, is_causal=causal)))
    pairs = (36 if causal else 64) * 2 * 3
    assert forward.matrix == 2 * 2 * pairs * 4
    backward = count(lambda: out[0].sum().backward())
    assert backward.matrix == 5 * 2 * pairs * 4
    everything = count(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal), False)
    assert everything.matrix == 2 * 2 * 64 * 6 * 4


def test_matmuls_equal_torchs_counter():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    x = torch.randn(5, 8)
    with FlopCounterMode(display=False) as torchs:
        model(x).sum().backward()
    ours = count(lambda: model(x).sum().backward())
    assert ours.matrix == torchs.get_total_flops() and ours.covered == 5


def test_grouped_products_count_their_rows_once():
    """12 rows in 3 groups, each row meets one (8, 16) matrix; torch's own counter says 0."""
    x = torch.randn(12, 8, dtype=torch.bfloat16)
    w = torch.randn(3, 8, 16, dtype=torch.bfloat16)
    offsets = torch.tensor([4, 4, 12], dtype=torch.int32)
    assert count(lambda: F.grouped_mm(x, w, offs=offsets)).matrix == 2 * 12 * 8 * 16


def test_grouped_products_backward():
    x = torch.randn(12, 8, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(3, 8, 16, dtype=torch.bfloat16, requires_grad=True)
    offsets = torch.tensor([4, 4, 12], dtype=torch.int32)

    def run():
        out = F.grouped_mm(x, w, offs=offsets)
        out.backward(torch.ones_like(out))

    assert count(run).matrix == 3 * 2 * 12 * 8 * 16


def test_fft_and_scans_are_vector_work():
    x = torch.randn(4, 64)
    found = count(lambda: (torch.fft.rfft(x), x.cumsum(-1)))
    assert found.matrix == 0
    assert found.vector == pytest.approx(4 * 2.5 * 64 * math.log2(64) + 4 * 64)
    assert count(lambda: torch.fft.fft(x.cfloat())).vector == 4 * 5 * 64 * 6
    assert count(lambda: torch.fft.irfft(torch.fft.rfft(x))).vector == 2 * 4 * 2.5 * 64 * 6


def test_custom_ops_are_named_as_uncovered():
    with torch.library._scoped_library("steplabtest", "FRAGMENT") as library:
        library.define("mystery(Tensor x) -> Tensor")
        library.impl("mystery", lambda x: x.clone(), "CompositeExplicitAutograd")
        found = count(lambda: torch.ops.steplabtest.mystery(torch.ones(3)))
    assert found.uncovered == {"steplabtest::mystery": 1}


def test_checkpointing_raises_the_hardware_count_only(tmp_path):
    """Recomputation is in HFU, not in MFU."""
    from steplab.engine.trial import trial
    from steplab.spec import RunSpec
    from steplab.workloads.workload import find_workload

    path = tmp_path / "mine.py"
    path.write_text(
        "import torch, steplab\n"
        "from torch.utils.checkpoint import checkpoint\n"
        "def make(recompute: bool = False):\n"
        "    def loss(model, x):\n"
        "        out = checkpoint(model, x, use_reentrant=False) if recompute else model(x)\n"
        "        return out.square().mean()\n"
        "    def batches(size):\n"
        "        while True:\n"
        "            yield torch.randn(size, 8, requires_grad=True)\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(),"
        " torch.nn.Linear(8, 8))\n"
        "    return steplab.Adopted(model, batches, loss)\n"
    )
    name = f"{path}:make"
    work = {}
    for recompute in (False, True):
        config = find_workload(name).resolve("", {"recompute": recompute})
        work[recompute] = trial(RunSpec(name, config, batch=4, steps=1, warmup=0)).work
    assert work[True].model == work[False].model == 3 * 2 * 2 * 4 * 64
    assert work[True].hardware > work[False].hardware
