"""A training step as one graph: the same numbers as without, step for step."""

import pytest
import torch

from steplab.core import RunSpec
from steplab.core.errors import Unsupported, UserError
from steplab.modules.rates import DeviceRates
from steplab.probes.compilation import graph_count
from steplab.step.assemble import assemble, micro_batches
from steplab.step.graph import graph_step
from steplab.step.step import Step
from steplab.techniques.recipes import parse_recipe, technique
from steplab.train.loop import set_learning_rate
from steplab.workloads.workload import find_workload
from tests.step.fake_graphs import FakeGraphs


def graphed(spec) -> tuple[Step, FakeGraphs]:
    """A step on the CPU whose graph is a stand-in."""
    step = assemble(spec)
    step.parts.graph_warmup = 2
    made = []
    graph_step(step, lambda device: made.append(FakeGraphs(device)) or made[0])
    if step.optimizer is not None:
        step.rates = DeviceRates(step.optimizer, step.parts.device)
    for group in step.optimizer.param_groups if step.optimizer else ():
        group["capturable"] = False  # torch has no such update on the CPU
    return step, made[0]


def tsmoe(recipe="plain", **changes) -> RunSpec:
    entry = find_workload("tsmoe")
    small = {"hidden_size": 16, "n_decoder_layers": 2, "n_head": 2, "num_experts": 4, "d_ff": 16}
    shape = {"d_expert": 16, "seq_max_len": 32, "patch_length": 1, "horizons": "1,4"}
    config = entry.resolve("tiny", {**small, **shape})
    return RunSpec("tsmoe", config, "tiny", batch=2, recipe=parse_recipe(recipe), **changes)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_losses_metrics_and_weights_are_those_of_the_plain_step(accumulate):
    spec = tsmoe(accumulate=accumulate)
    (step, graphs), plain = graphed(spec), assemble(spec)
    plain.rates = DeviceRates(plain.optimizer, plain.parts.device)  # fp32, as in the graph
    feed, feed_plain = micro_batches(step, spec), micro_batches(plain, spec)
    for number in range(6):
        for one in (step, plain):
            set_learning_rate(one.optimizer, 1e-3 * (number + 1))
        seen, expected = step(next(feed)), plain(next(feed_plain))
        assert torch.equal(seen.loss, expected.loss)
        assert torch.equal(seen.metrics["load_LE"], expected.metrics["load_LE"])
    assert graphs.captures == 1 and graphs.replays == 4
    for ours, theirs in zip(step.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_what_is_compiled_for_slices_is_not_compiled_again_for_the_graphs_buffers(tiny_spec):
    """gpt's tokens and targets are slices of one tensor, with gaps between their rows."""
    spec = tiny_spec(recipe=parse_recipe("compile=whole,compile.backend=eager"))
    step, graphs = graphed(spec)
    feed = micro_batches(step, spec)
    torch._dynamo.reset()
    for _ in range(2):
        step(next(feed))
    compiled = graph_count()
    step(next(feed))
    assert graphs.captures == 1 and compiled and graph_count() == compiled


def test_phases_are_watched_as_one(tiny_spec):
    import contextlib

    step, _ = graphed(tiny_spec())
    seen = []
    step.watch = lambda phase: seen.append(phase) or contextlib.nullcontext()
    feed = micro_batches(step, tiny_spec())
    for _ in range(4):
        step(next(feed))
    assert seen == ["replay"] * 4
    step.graph = None
    step(next(feed))
    assert seen[4:] == ["forward", "backward", "clip", "optimizer"]


def test_a_gradient_scaler_is_refused(tiny_spec):
    with pytest.raises(Unsupported, match="gradient scaler decides on the host"):
        graphed(tiny_spec("precision=fp16"))
    graphed(tiny_spec("precision=fp16", mode="infer"))


def test_inference_is_graphed_too(tiny_spec):
    spec = tiny_spec(mode="infer")
    step, graphs = graphed(spec)
    feed = micro_batches(step, spec)
    for _ in range(4):
        step(next(feed))
    assert graphs.captures == 1 and graphs.replays == 2


def test_without_a_gpu_the_technique_is_refused_with_the_way_out(tiny_spec):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(Unsupported, match=r"needs a CUDA GPU. Add cuda_graph=off"):
        assemble(tiny_spec("cuda_graph=step"))


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("cuda_graph=step,compile=whole,compile.mode=reduce-overhead", "graphs of its own"),
        ("cuda_graph=step,compile=whole,compile.mode=max-autotune", "graphs of its own"),
        ("cuda_graph=step,checkpointing=blocks", "checkpointing.rng=false"),
        ("cuda_graph=step,cuda_graph.warmup=0", "at least 1"),
    ],
)
def test_recipes_that_cannot_be(recipe, words):
    with pytest.raises(UserError, match=words):
        parse_recipe(recipe)


def test_recipes_that_can_be():
    parse_recipe("cuda_graph=step,compile=whole,compile.mode=max-autotune-no-cudagraphs")
    parse_recipe("cuda_graph=step,checkpointing=blocks,checkpointing.rng=false")
    parse_recipe("cuda_graph=step,checkpointing=blocks,compile=blocks")


def test_a_run_must_show_the_replay():
    from steplab.core import Environment, Ran, Run

    def seen(ran):
        environment = Environment("0", "3.11", "Linux", "cpu", 2, None)
        return Run("id", RunSpec("gpt", device="cuda"), environment, ran=ran)

    check = technique("cuda_graph").mismatch
    assert check({}, seen(Ran(graph_launches=1))) == ""
    assert "no graph was replayed" in check({}, seen(Ran(graph_launches=0)))
