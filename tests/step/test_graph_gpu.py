"""On a GPU: replays give the bits of plain steps; what cannot be captured is refused by line."""

import pytest
import torch
from torch import nn

import steplab
from steplab.core import RunSpec
from steplab.core.errors import Unsupported
from steplab.modules.rates import DeviceRates
from steplab.step.assemble import assemble, micro_batches
from steplab.step.graph import make_capturable
from steplab.step.trial import trial
from steplab.techniques.recipes import parse_recipe
from steplab.workloads.workload import find_workload
from tests.own_models import named

pytestmark = pytest.mark.gpu

# Attention op by op: flash's backward adds up with atomics, in any order.
BASE = "precision=bf16,optimizer=fused,impl.attention=math"


def tsmoe(recipe=BASE, **changes) -> RunSpec:
    config = find_workload("tsmoe").resolve("tiny", {})
    fields = {"batch": 4, "steps": 5, "warmup": 2, "device": "cuda", **changes}
    return RunSpec("tsmoe", config, "tiny", recipe=parse_recipe(recipe), **fields)


def losses(spec: RunSpec, steps: int, capturable: bool = False):
    step = assemble(spec)
    if capturable:
        make_capturable(step.optimizer)
        step.rates = DeviceRates(step.optimizer, step.parts.device)
    feed = micro_batches(step, spec)
    outputs = [step(next(feed)) for _ in range(steps)]
    return step, outputs


@pytest.mark.parametrize(
    "more", ["", ",compile=blocks", ",checkpointing=blocks,checkpointing.rng=false"]
)
def test_twenty_steps_with_changing_routing_are_bit_equal(more):
    graphed, seen = losses(tsmoe(f"{BASE}{more},cuda_graph=step"), 20)
    plain, expected = losses(tsmoe(BASE + more), 20, capturable=True)
    for number, (ours, theirs) in enumerate(zip(seen, expected, strict=True)):
        assert torch.equal(ours.loss, theirs.loss), f"step {number}: {ours.loss} {theirs.loss}"
        assert torch.equal(ours.metrics["load_LE"], theirs.metrics["load_LE"])
    loads = torch.stack([output.metrics["load_LE"] for output in seen[4:]])
    assert (loads != loads[0]).any(), "the routing changed from replay to replay"
    for ours, theirs in zip(graphed.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_model_compiled_whole_is_captured():
    """Its inputs are slices: the graph's buffers must look the same to what was compiled."""
    config = find_workload("gpt").resolve("tiny", {})
    recipe = parse_recipe("precision=bf16,optimizer=fused,compile=whole,cuda_graph=step")
    run = trial(RunSpec("gpt", config, "tiny", batch=4, recipe=recipe, steps=5, device="cuda"))
    assert run.status == "ok" and run.ran.graph_launches == 1, run.reason


@pytest.mark.parametrize("optimizer", ["forloop", "foreach", "fused"])
def test_every_update_can_be_captured_and_follows_a_schedule(optimizer):
    weights = []
    for graph in (",cuda_graph=step", ""):
        spec = tsmoe(f"precision=bf16,impl.attention=math,optimizer={optimizer}{graph}")
        step = assemble(spec)
        make_capturable(step.optimizer)
        step.rates = step.rates or DeviceRates(step.optimizer, step.parts.device)
        feed = micro_batches(step, spec)
        for number in range(10):
            for group in step.optimizer.param_groups:
                group["lr"] = 1e-3 / (number + 1)
            step(next(feed))
        weights.append(torch.cat([p.detach().flatten() for p in step.model.parameters()]))
    assert torch.equal(*weights)


def test_accumulation_is_captured_whole():
    _, seen = losses(tsmoe(f"{BASE},cuda_graph=step", accumulate=3), 8)
    _, expected = losses(tsmoe(accumulate=3), 8, capturable=True)
    assert all(torch.equal(a.loss, b.loss) for a, b in zip(seen, expected, strict=True))


@pytest.mark.parametrize("mode", ["infer", "forward", "forward+backward", "full"])
def test_a_run_says_that_it_replayed_and_counts_the_pool(mode):
    recipe = "precision=bf16,cuda_graph=step"
    run, plain = trial(tsmoe(recipe, mode=mode)), trial(tsmoe("precision=bf16", mode=mode))
    assert run.status == "ok", run.reason
    assert run.ran.graph_launches == 1
    assert run.ran.kernel_launches < 30 < plain.ran.kernel_launches
    assert run.memory.peak > 0.9 * plain.memory.peak, "the graph's pool is part of the peak"


def test_with_compile_and_its_warm_second_start():
    run = trial(tsmoe("precision=bf16,compile=blocks,optimizer=fused,cuda_graph=step"))
    assert run.status == "ok", run.reason
    assert run.ran.graph_launches == 1 and run.compilation.graphs_in_window == 0


def test_prefetched_batches_are_the_same():
    _, seen = losses(tsmoe(f"{BASE},cuda_graph=step,prefetch=2"), 10)
    _, expected = losses(tsmoe(), 10, capturable=True)
    assert all(torch.equal(a.loss, b.loss) for a, b in zip(seen, expected, strict=True))


def test_experts_that_read_the_routing_are_refused_with_their_line():
    run = trial(tsmoe("impl.experts=loop,cuda_graph=step"))
    assert run.status == "unsupported" and "experts/loop.py:" in run.reason, run.reason


OWN = """
import torch, steplab
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Linear(1, 32), nn.Linear(32, 1)
        self.gru = nn.GRU(32, 32, batch_first=True)
        self.drop = nn.Dropout(0.1)
    def forward(self, x):
        h = self.drop(self.gru(self.embed(x[..., None]))[0])
        {line}
        return self.out(h)[..., 0]
def make():
    def batches(size):
        step = 0
        while True:
            step += 1
            yield torch.randn(size, 24 if {vary} and step > 8 else 16)
    return steplab.UserModel(Net(), batches, lambda m, x: (m(x) - x).square().mean())
"""


def own(tmp_path, line="pass", vary=False) -> RunSpec:
    path = tmp_path / "own.py"
    path.write_text(OWN.format(line=line, vary=vary))
    fields = {"batch": 4, "steps": 5, "warmup": 2, "device": "cuda"}
    return RunSpec(named(f"{path}:make"), recipe=parse_recipe("cuda_graph=step"), **fields)


def test_a_users_own_model(tmp_path):
    run = trial(own(tmp_path))
    assert run.status == "ok", run.reason
    assert run.ran.graph_launches == 1 and len(set(run.losses)) == len(run.losses)


@pytest.mark.parametrize("line", ["h = h * h.abs().max().item()", "h = h + h[h > 0].sum()"])
def test_a_model_that_waits_is_refused_with_its_line(tmp_path, line):
    run = trial(own(tmp_path, line))
    assert run.status == "unsupported" and "own.py:12 (forward)" in run.reason, run.reason


def test_a_batch_of_another_shape_is_refused(tmp_path):
    run = trial(own(tmp_path, vary=True))
    assert run.status == "unsupported" and "(4, 16) float32 and is (4, 24)" in run.reason, (
        run.reason
    )


def test_inference_by_graph():
    config = find_workload("tsmoe").resolve("tiny", {})
    workload = find_workload("tsmoe").open(config)
    with torch.device("cuda"):
        model = workload.model().eval()

    def predict(values):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(values).outputs_BNH

    values = torch.randn(6, 2, config["seq_max_len"], device="cuda").cumsum(-1)
    fast = steplab.graph(predict, (values[0],))
    with torch.no_grad():
        for one in values:
            assert torch.equal(fast(one), predict(one))
        outputs = [fast(one) for one in values]
        assert torch.equal(outputs[0], predict(values[0])), "later calls leave it alone"


def test_inference_that_waits_is_refused():
    class Waits(nn.Module):
        def forward(self, x):
            return x[x > 0]

    with pytest.raises(Unsupported, match=r"test_graph_gpu.py:\d+ .forward."):
        steplab.graph(Waits().eval(), (torch.randn(8, device="cuda"),))
    # The device is as usable as before.
    assert (
        steplab.graph(nn.ReLU().eval(), (torch.ones(2, device="cuda"),))(
            torch.ones(2, device="cuda")
        ).sum()
        == 2
    )
