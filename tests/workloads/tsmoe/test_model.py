import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from steplab.core import RunSpec
from steplab.core.errors import UserError
from steplab.step.assemble import assemble, micro_batches
from steplab.step.trial import trial
from steplab.techniques.recipes import parse_recipe
from steplab.workloads.tsmoe.config import PRESETS, TsmoeConfig
from steplab.workloads.tsmoe.flops import matmul_parameters, parameters, work
from steplab.workloads.tsmoe.loss import HorizonLoss, balance, balance_across_layers
from steplab.workloads.tsmoe.model import Tsmoe
from steplab.workloads.workload import find_workload
from tests.step.syncs import run_without_syncs

SHAPE = {"hidden_size": 32, "n_decoder_layers": 2, "n_head": 2, "num_experts": 4, "d_ff": 32}
SMALL = TsmoeConfig(**SHAPE, d_expert=16, seq_max_len=72)


def spec_of(recipe="plain", config=None, **changes):
    resolved = find_workload("tsmoe").resolve(
        "tiny", {**SHAPE, "d_expert": 16, "seq_max_len": 72, **(config or {})}
    )
    fields = {"batch": 2, "steps": 2, "warmup": 1, "recipe": parse_recipe(recipe), **changes}
    return RunSpec("tsmoe", resolved, "tiny", **fields)


@pytest.mark.parametrize(
    ("size", "total", "active"),
    [
        ("flagship", 538_130_793, 198_392_169),
        ("flagship-reduced", 44_889_321, None),
        ("small", 35_495_145, None),
        ("time-moe-50m", 113_352_192, None),
        ("time-moe-200m", 453_196_800, None),
    ],
)
def test_parameters_are_exact(size, total, active):
    config = PRESETS[size]
    with torch.device("meta"):
        built = sum(p.numel() for p in Tsmoe(config).parameters())
    assert built == parameters(config)[0] == total
    if active:
        assert parameters(config)[1] == active


def test_flops_of_the_flagship():
    """1.4166 GFLOP per token: six per active weight and causal attention at 4096 tokens."""
    config = PRESETS["flagship"]
    by_hand = 6 * matmul_parameters(config) + 6 * 12 * 768 * (4096 + 1)
    assert work(config, 1, "full", {}).model == by_hand * 4096
    assert by_hand == pytest.approx(1.4166e9, rel=1e-4)


@pytest.mark.parametrize("layout", ["gelu", "time-moe"])
def test_flops_equal_torchs_count(layout):
    """With the loop over experts and reference attention, torch's counter sees every product."""
    config = TsmoeConfig(**SHAPE, d_expert=16, seq_max_len=72, layout=layout)
    model = Tsmoe(config)
    for module in model.modules():
        if hasattr(module, "op"):
            module.impl = {"attention": "reference", "experts": "loop"}.get(module.op, "auto")
    values = torch.randn(2, 73)
    with FlopCounterMode(display=False) as counter:
        model(values, torch.ones(2, 73, dtype=torch.bool))
    assert work(config, 2, "forward", {}).palm == counter.get_total_flops()


@pytest.mark.parametrize("impl", ["loop", "grouped", "capacity"])
@pytest.mark.parametrize("patch", [1, 4])
def test_causality(impl, patch):
    """Capacity drops in token order, so even its drops do not look ahead within a sequence."""
    torch.manual_seed(0)
    model = Tsmoe(TsmoeConfig(**SHAPE, d_expert=16, seq_max_len=72, patch_length=patch))
    for module in model.modules():
        if getattr(module, "op", "") == "experts":
            module.impl = impl
    values = torch.randn(1, 72)
    changed = values.clone()
    changed[:, 40:] += 1.0
    with torch.no_grad():
        before, after = model(values).outputs_BNH, model(changed).outputs_BNH
    first = 40 // patch
    torch.testing.assert_close(before[:, :first], after[:, :first], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(before[:, first:], after[:, first:])


def test_a_series_does_not_depend_on_its_neighbors():
    torch.manual_seed(0)
    model = Tsmoe(SMALL).double()
    values = torch.randn(4, 72, dtype=torch.float64)
    with torch.no_grad():
        whole, alone = model(values).outputs_BNH, model(values[2:3]).outputs_BNH
    torch.testing.assert_close(whole[2:3], alone, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("layout", ["gelu", "time-moe"])
def test_every_parameter_gets_a_gradient(layout):
    torch.manual_seed(0)
    model = Tsmoe(TsmoeConfig(**SHAPE, d_expert=16, seq_max_len=72, layout=layout))
    model(torch.randn(4, 73), torch.ones(4, 73, dtype=torch.bool)).total.backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


def test_all_dispatches_start_at_the_same_loss():
    losses = {}
    for impl in ("loop", "grouped", "capacity"):
        spec = spec_of(f"impl.experts={impl}")
        step = assemble(spec)
        output = step(next(micro_batches(step, spec)))
        losses[impl] = output.metrics["pred"].item()
        assert output.metrics["dropped"].item() <= 0.4
    assert losses["grouped"] == pytest.approx(losses["loop"], rel=1e-6)
    assert losses["capacity"] == pytest.approx(losses["loop"], rel=0.02)
    assert losses["loop"] < 2


def test_horizon_loss_equals_a_loop_over_points():
    torch.manual_seed(0)
    horizons, T = (1, 3, 5), 9
    outputs, values = torch.randn(2, T, 9), torch.randn(2, T + 1) * 3
    mask = torch.rand(2, T + 1) > 0.2
    sums, counts = [0.0] * 3, [0] * 3
    for b in range(2):
        for t in range(T):
            for j, h in enumerate(horizons):
                start = sum(horizons[:j])
                for i in range(h):
                    point = t + 1 + i
                    if point <= T and mask[b, point]:
                        prediction = outputs[b, t, start + i]
                        sums[j] += F.huber_loss(prediction, values[b, point], delta=2.0).item()
                        counts[j] += 1
    expected = sum(s / c for s, c in zip(sums, counts, strict=True)) / 3
    loss = HorizonLoss(horizons, 1, 2.0)(outputs, values, mask)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_patches_predict_what_follows_them():
    """A head that knows the future exactly has no loss."""
    values = torch.arange(13.0)[None]
    targets = torch.stack([values[0, 4 * (n + 1) : 4 * (n + 1) + 5] for n in range(2)])
    outputs = torch.zeros(1, 3, 5)
    outputs[0, :2] = targets
    outputs[0, 2, 0] = values[0, 12]
    loss = HorizonLoss((5,), 4, 2.0)(outputs, values, torch.ones(1, 13, dtype=torch.bool))
    assert loss.item() == 0


def test_balance_is_one_when_even_and_e_when_collapsed():
    even = torch.full((3, 4), 0.25)
    one = torch.tensor([1.0, 0, 0, 0]).expand(3, 4)
    assert balance(even, even).item() == pytest.approx(1)
    assert balance(one, one).item() == pytest.approx(4)
    assert balance_across_layers(even, even, 2).item() == pytest.approx(2)


def test_balance_sees_what_cancels_across_layers():
    opposed = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert balance(opposed, opposed).item() == pytest.approx(2)
    assert balance_across_layers(opposed, opposed, 1).item() == pytest.approx(1)


def test_time_moe_definition_over_concatenated_tokens():
    """Against the definition by one-hot vectors over all layers' tokens."""
    torch.manual_seed(0)
    L, T, E, K = 3, 50, 4, 2
    probabilities = torch.randn(L, T, E).softmax(-1)
    chosen = probabilities.topk(K, -1).indices
    hot = F.one_hot(chosen, E).float()
    expected = E * (hot.flatten(0, 1).mean(0) * probabilities.flatten(0, 1).mean(0)).sum()
    load = hot.mean((1, 2))
    actual = balance_across_layers(load, probabilities.mean(1), K)
    assert actual.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["grouped", "capacity"])
@pytest.mark.parametrize("optimizer", ["false", "true"])
def test_compiled_once_whatever_the_routing(impl, optimizer):
    """50 steps of changing routing: one forward graph with its backward, and the optimizer's."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    words = f"compile=whole,compile.backend=aot_eager,compile.optimizer={optimizer}"
    spec = spec_of(f"{words},impl.experts={impl}")
    step = assemble(spec)
    feed = micro_batches(step, spec)
    loads, graphs = [], []
    for number in range(50):
        for group in step.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(1e-3 * (number + 1) / 50)
        loads.append(step(next(feed)).metrics["load_LE"])
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[0] == (2 if optimizer == "true" else 1)
    assert len({tuple(load.flatten().tolist()) for load in loads}) > 10


@pytest.mark.parametrize("scope", ["blocks", "whole"])
def test_compiled_equals_eager(scope):
    losses = []
    for recipe in ("plain", f"compile={scope},compile.backend=aot_eager"):
        spec = spec_of(recipe)
        step = assemble(spec)
        feed = micro_batches(step, spec)
        losses.append([step(next(feed)).loss.item() for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_run_says_when_products_went_group_by_group():
    compiled = "compile=blocks,compile.backend=aot_eager"
    for recipe in ("plain", compiled):
        assert trial(spec_of(recipe)).ran.impls["grouped_mm"] == ("aten",)
    odd = trial(spec_of(compiled, {"d_expert": 15}))  # torch's op needs rows of 16 bytes
    assert odd.status == "ok", odd.reason
    assert odd.ran.impls["grouped_mm"] == ("loop",)


def test_norms_are_fused_under_autocast(recwarn):
    """A 16-bit stream meeting fp32 norm weights would fall back to the unfused norm."""
    model = Tsmoe(SMALL)
    seen = {}
    model.blocks[1].attention_norm.register_forward_hook(
        lambda module, inputs, out: seen.update(dtype=inputs[0].dtype)
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(2, 72))
    assert seen["dtype"] == torch.float32
    assert not [w for w in recwarn if "fused" in str(w.message)]


def test_several_mixture_layers_per_block():
    config = TsmoeConfig(**SHAPE, d_expert=16, seq_max_len=72, num_expert_layers=3)
    model = Tsmoe(config)
    assert sum(p.numel() for p in model.parameters()) == parameters(config)[0]
    forecast = model(torch.randn(1, 72))
    assert forecast.load_LE.shape == (6, 4)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"n_head": 5}, "does not split"),
        ({"k": 9, "num_experts": 8}, "more than the 8 experts"),
        ({"patch_length": 7}, "not a multiple"),
        ({"horizons": "1,x"}, "must be numbers"),
        ({"seq_max_len": 64}, "longest horizon"),
        ({"d_expert": 0}, "at least 1"),
    ],
)
def test_bad_configs_are_refused(overrides, words):
    with pytest.raises(UserError, match=words):
        find_workload("tsmoe").resolve("flagship", overrides)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "recipe", ["", ",compile=blocks", ",compile=whole,compile.mode=reduce-overhead"]
)
def test_gpu_step_runs_without_host_syncs(recipe):
    spec = spec_of(f"precision=bf16,optimizer=fused{recipe}", device="cuda")
    _, output = run_without_syncs(spec, warmup=4)
    assert torch.isfinite(output.loss)


@pytest.mark.gpu
def test_gpu_trains_as_the_cpu_does():
    spec = spec_of()
    on_cpu, on_gpu = assemble(spec), assemble(spec_of(device="cuda"))
    # The generators of the two devices differ, so the weights are copied.
    on_gpu.model.load_state_dict(on_cpu.model.state_dict())
    cpu_feed, gpu_feed = micro_batches(on_cpu, spec), micro_batches(on_gpu, spec)
    for _ in range(3):
        here, there = on_cpu(next(cpu_feed)).loss.item(), on_gpu(next(gpu_feed)).loss.item()
        assert there == pytest.approx(here, rel=1e-3)
