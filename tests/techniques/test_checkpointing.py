"""Recomputed activations: the same gradients with less kept, also where experts are routed."""

import pytest
import torch
import torch._functorch.config
from torch import nn

from steplab.core import RunSpec
from steplab.core.errors import UserError
from steplab.modules.experts import Router
from steplab.step.assemble import assemble, micro_batches
from steplab.techniques.checkpointing import recompute
from steplab.techniques.recipes import parse_recipe
from steplab.workloads.workload import find_workload


def tsmoe(recipe: str, layers: int = 3, **changes) -> RunSpec:
    small = {
        "hidden_size": 16,
        "n_decoder_layers": layers,
        "n_head": 2,
        "num_experts": 4,
        "d_ff": 16,
    }
    shape = {"d_expert": 16, "seq_max_len": 32, "patch_length": 1, "horizons": "1,4"}
    config = find_workload("tsmoe").resolve("tiny", {**small, **shape})
    fields = {"batch": 2, "mode": "full", **changes}
    return RunSpec("tsmoe", config, "tiny", recipe=parse_recipe(recipe), **fields)


def saved_bytes(step, batch) -> int:
    """Bytes of everything that autograd keeps for backward, each storage once."""
    kept: dict[int, int] = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    parameters = {p.untyped_storage().data_ptr() for p in step.model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss, _ = step.workload.loss(step.model, batch)
    del loss
    return sum(size for address, size in kept.items() if address not in parameters)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("every", [1, 2])
def test_weights_are_those_of_the_step_that_keeps_everything(precision, every):
    weights = []
    for more in ("", f",checkpointing=blocks,checkpointing.every={every}"):
        spec = tsmoe(f"precision={precision}{more}")
        step = assemble(spec)
        feed = micro_batches(step, spec)
        for _ in range(2):
            step(next(feed))
        weights.append({n: p.detach().clone() for n, p in step.model.named_parameters()})
    assert weights[0].keys() == weights[1].keys(), "names stay as they are"
    for name, kept in weights[0].items():
        assert torch.equal(kept, weights[1][name]), name


def test_running_statistics_move_once_a_step():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            return torch.tanh(self.norm(x))

    x, found = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), []
    for wanted in (False, True):
        block = Block()
        recompute(block, wanted, rng=True)
        for _ in range(3):
            block(x).square().sum().backward()
        found.append(dict(block.named_buffers()) | {"gradient": block.norm.weight.grad})
    for name, kept in found[0].items():
        assert torch.equal(kept, found[1][name]), name


def test_experts_are_chosen_again_as_before():
    spec = tsmoe("precision=bf16,checkpointing=blocks")
    step = assemble(spec)
    choices = []
    for module in step.model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda m, i, out: choices.append(out[2].clone()))
    step(next(micro_batches(step, spec)))
    layers = spec.config["n_decoder_layers"]
    assert len(choices) == 2 * layers, "once in forward, once in backward"
    for first, again in zip(choices[:layers], reversed(choices[layers:]), strict=True):
        assert torch.equal(first, again)


def test_less_is_kept_and_every_second_block_lies_between():
    kept = {}
    for recipe in ("plain", "checkpointing=blocks", "checkpointing=blocks,checkpointing.every=2"):
        spec = tsmoe(recipe)
        step = assemble(spec)
        kept[recipe] = saved_bytes(step, next(micro_batches(step, spec))[0])
    plain, every, second = kept.values()
    assert every < second < plain and every < 0.5 * plain


@pytest.mark.parametrize("scope", ["blocks", "whole"])
def test_compiled_blocks_still_share_one_graph(scope):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    recipe = f"checkpointing=blocks,compile={scope},compile.backend=aot_eager"
    losses = []
    for one in (recipe, "plain"):
        spec = tsmoe(one, layers=2)
        step = assemble(spec)
        losses.append(step(next(micro_batches(step, spec))).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_a_budget_is_the_compilers_and_ends_with_the_recipe(tiny_spec):
    assemble(tiny_spec("checkpointing=budget,checkpointing.keep=0.25,compile=whole"))
    assert torch._functorch.config.activation_memory_budget == 0.25
    assemble(tiny_spec())
    assert torch._functorch.config.activation_memory_budget == 1.0


def test_recomputing_elementwise_work_is_the_compilers_and_ends_with_the_recipe(tiny_spec):
    assemble(tiny_spec("checkpointing=elementwise,compile=blocks"))
    assert not torch._functorch.config.ban_recompute_materialized_backward
    assemble(tiny_spec())
    assert torch._functorch.config.ban_recompute_materialized_backward
    with pytest.raises(UserError, match="compile=blocks"):
        parse_recipe("checkpointing=elementwise")


def test_a_smaller_budget_keeps_less(tiny_spec):
    kept = []
    for more in ("", ",checkpointing=budget,checkpointing.keep=0.0"):
        torch._dynamo.reset()
        spec = tiny_spec(f"compile=whole,compile.backend=aot_eager{more}")
        step = assemble(spec)
        kept.append(saved_bytes(step, next(micro_batches(step, spec))[0]))
    assert kept[1] < kept[0]


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("checkpointing=budget", "compile=whole"),
        ("checkpointing=budget,compile=blocks", "compile=whole"),
        ("checkpointing=blocks,checkpointing.every=0", "at least 1"),
        ("checkpointing=budget,checkpointing.keep=1.5,compile=whole", "below 1"),
        ("checkpointing=all", "cannot be 'all'"),
    ],
)
def test_refusals(recipe, words):
    with pytest.raises(UserError, match=words):
        parse_recipe(recipe)


def test_inference_recomputes_nothing(tiny_spec):
    spec = tiny_spec("checkpointing=blocks", mode="infer")
    step = assemble(spec)
    calls = []
    step.model.blocks[0].register_forward_hook(lambda *a: calls.append(1))
    step(next(micro_batches(step, spec)))
    assert len(calls) == 1
