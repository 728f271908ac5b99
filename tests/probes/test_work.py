"""Our FLOP formulas against torch's own counter and against arithmetic."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from steplab.probes.formulas import MATRIX_OPS
from steplab.probes.work import FlopCounter
from tests.own_models import named


def count(run, visible=True):
    with FlopCounter(visible) as counter:
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
    from steplab.core import RunSpec
    from steplab.step.trial import trial
    from steplab.workloads.workload import requested_workload

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
        "    return steplab.UserModel(model, batches, loss)\n"
    )
    name = f"{path}:make"
    work = {}
    for recompute in (False, True):
        config = requested_workload(name).resolve("", {"recompute": recompute})
        work[recompute] = trial(RunSpec(name, config, batch=4, steps=1, warmup=0)).work
    assert work[True].model == work[False].model == 3 * 2 * 2 * 4 * 64
    assert work[True].hardware > work[False].hardware


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_recurrent_layers_equal_their_products(kind, bidirectional, layers):
    """gates x hidden x (in + hidden) multiply-adds per row, layer and direction; 3 x in training.

    LSTM runs as one opaque op per layer on CPU, the others as their products.
    """
    T, B, D, H = 6, 3, 5, 7
    gates = {torch.nn.LSTM: 4, torch.nn.GRU: 3, torch.nn.RNN: 1}[kind]
    directions = 2 if bidirectional else 1
    model = kind(D, H, num_layers=layers, bidirectional=bidirectional)
    inputs = [D] + [H * directions] * (layers - 1)
    per_row = sum(2 * gates * H * (width + H) * directions for width in inputs)
    x = torch.randn(T, B, D, requires_grad=True)
    out = []
    forward = count(lambda: out.append(model(x)[0]))
    assert forward.matrix == per_row * T * B and not forward.uncovered
    if kind is torch.nn.LSTM:
        assert count(lambda: out[0].sum().backward()).matrix == 2 * per_row * T * B


@pytest.mark.parametrize("op", ["_cudnn_rnn", "miopen_rnn"])
def test_recurrent_ops_of_gpus_by_their_arguments(op):
    """A stack of two LSTM layers with a projection: every row meets every matrix once."""
    T, B, D, H, P = 6, 3, 5, 7, 2
    shapes = [(4 * H, D), (4 * H, P), (4 * H,), (4 * H,), (P, H)]
    shapes += [(4 * H, P), (4 * H, P), (4 * H,), (4 * H,), (P, H)]
    weights = [torch.empty(shape, device="meta") for shape in shapes]
    x = torch.empty(T, B, D, device="meta")
    once = 2 * T * B * (4 * H * (D + P) + 4 * H * 2 * P + 2 * P * H)
    aten = torch.ops.aten
    assert MATRIX_OPS[getattr(aten, op)](x, weights, 5) == once
    backward = MATRIX_OPS[getattr(aten, f"{op}_backward")]
    assert backward(x, weights, 5, [True, True, True, True]) == 2 * once
    assert backward(x, weights, 5, output_mask=[True, True, True, False]) == once
    packed = x.view(T * B, D)
    assert MATRIX_OPS[getattr(aten, op)](packed, weights, 5) == once


@pytest.mark.gpu
def test_recurrent_layers_on_the_gpu():
    model = torch.nn.LSTM(5, 7, num_layers=2).cuda()
    x = torch.randn(6, 3, 5, device="cuda", requires_grad=True)
    weights = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert count(lambda: model(x)[0].sum().backward()).matrix == 3 * 2 * 18 * weights


def test_products_that_torchs_counter_leaves_out():
    a, b, v = torch.randn(4, 5), torch.randn(5, 6), torch.randn(5)
    batch, other = torch.randn(3, 4, 5), torch.randn(3, 5, 6)
    cases = {
        "mv": (lambda: a.mv(v), 2 * 4 * 5),
        "addmv": (lambda: torch.addmv(torch.zeros(4), a, v), 2 * 4 * 5),
        "dot": (lambda: v.dot(v), 2 * 5),
        "addmm_": (lambda: torch.zeros(4, 6).addmm_(a, b), 2 * 4 * 5 * 6),
        "addbmm": (lambda: torch.addbmm(torch.zeros(4, 6), batch, other), 3 * 2 * 4 * 5 * 6),
        "baddbmm_": (lambda: torch.zeros(3, 4, 6).baddbmm_(batch, other), 3 * 2 * 4 * 5 * 6),
        "activation": (lambda: torch._addmm_activation(torch.zeros(6), a, b), 2 * 4 * 5 * 6),
    }
    for name, (run, flops) in cases.items():
        found = count(run)
        assert (found.matrix, found.covered) == (flops, 1), name


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (lambda: torch.nn.Bilinear(3, 4, 5)(torch.ones(2, 3), torch.ones(2, 4)), "_trilinear"),
        (lambda: torch.cdist(torch.ones(2, 3), torch.ones(4, 3), p=1.0), "_cdist_forward"),
        (lambda: torch.linalg.cholesky(torch.eye(3)), "linalg_cholesky_ex"),
        (lambda: torch.linalg.svd(torch.eye(3)), "_linalg_svd"),
        (lambda: torch.linalg.solve(torch.eye(3), torch.eye(3)), "_linalg_solve_ex"),
        (
            lambda: torch.linalg.solve_triangular(torch.eye(3), torch.eye(3), upper=True),
            "linalg_solve_triangular",
        ),
    ],
)
def test_heavy_ops_without_a_formula_are_named(run, name):
    assert count(run).uncovered == {f"aten::{name}": 1}


def test_a_flexible_attention_is_named():
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 2, 16, 8)
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it is slow without compilation
        found = count(lambda: flex_attention(q, q, q))
    assert found.uncovered == {"higher_order::flex_attention": 1}


def test_a_full_step_of_light_ops_leaves_nothing_uncovered():
    """Clipping, LSTM cells, interpolation, norms and an optimizer have names like heavy ops."""
    cell, norm = torch.nn.GRUCell(4, 4), torch.nn.LayerNorm(4)
    optimizer = torch.optim.AdamW(cell.parameters(), fused=True)

    def run():
        x = F.interpolate(torch.ones(1, 2, 2), size=4, mode="linear")[0]
        norm(cell(x)).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(cell.parameters(), 1.0)
        optimizer.step()

    assert count(run).uncovered == {}


def adopted(tmp_path, body):
    """Return the Work of one trial of a model of the user's."""
    from steplab.core import RunSpec
    from steplab.step.trial import trial

    path = tmp_path / "mine.py"
    path.write_text(
        "import torch, steplab\n"
        f"{body}\n"
        "def batches(size):\n"
        "    while True:\n"
        "        yield torch.randn(size, 6, 8)\n"
        "def make():\n"
        "    loss = lambda model, x: model(x).square().mean()\n"
        "    return steplab.UserModel(Model(), batches, loss)\n"
    )
    return trial(RunSpec(named(f"{path}:make"), {}, batch=4, steps=1, warmup=0)).work


def test_an_lstm_of_the_users_has_known_work(tmp_path):
    work = adopted(
        tmp_path,
        "class Model(torch.nn.LSTM):\n"
        "    def __init__(self): super().__init__(8, 16, batch_first=True)\n"
        "    def forward(self, x): return super().forward(x)[0]",
    )
    assert work.model == work.palm == work.hardware == 3 * 2 * (4 * 6) * 4 * 16 * (8 + 16)
    assert work.uncovered_calls == {}


def test_a_loss_that_asks_for_gradients_is_counted_with_them(tmp_path):
    """A penalty on the gradient: the forward pass has a second product."""
    work = adopted(
        tmp_path,
        "class Model(torch.nn.Linear):\n"
        "    def __init__(self): super().__init__(8, 16, bias=False)\n"
        "    def forward(self, x):\n"
        "        y = super().forward(x.requires_grad_())\n"
        "        return torch.autograd.grad(y.square().sum(), x, create_graph=True)[0]",
    )
    product = 2 * (4 * 6) * 8 * 16
    assert work.model == work.hardware == 3 * 2 * product


def test_a_step_with_flexible_attention_is_not_counted_in_training(tmp_path):
    """Its backward under a counter ends the process: torch throws in a destructor."""
    work = adopted(
        tmp_path,
        "from torch.nn.attention.flex_attention import flex_attention\n"
        "from torch.utils._python_dispatch import _get_current_dispatch_mode\n"
        "class Model(torch.nn.Linear):\n"
        "    def __init__(self): super().__init__(8, 8)\n"
        "    def forward(self, x):\n"
        "        counted = type(_get_current_dispatch_mode()).__name__ == 'FlopCounter'\n"
        "        assert not (counted and torch.is_grad_enabled())\n"
        "        with torch.no_grad():\n"
        "            x = flex_attention(x[None], x[None], x[None])[0] if counted else x\n"
        "        return super().forward(x)",
    )
    assert work.uncovered_calls == {"higher_order::flex_attention": 1} and work.hardware is None


def test_work_with_an_uncovered_op_is_unknown(tmp_path):
    work = adopted(
        tmp_path,
        "class Model(torch.nn.Linear):\n"
        "    def __init__(self): super().__init__(8, 8)\n"
        "    def forward(self, x): return torch.cdist(super().forward(x), x, p=1.0)",
    )
    assert (work.model, work.palm, work.hardware) == (None, None, None)
    assert work.uncovered_calls == {"aten::_cdist_forward": 1, "aten::_cdist_backward": 1}
