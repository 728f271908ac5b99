"""Recomputed activations: the same gradients with less kept, also where experts are routed."""

import contextlib
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch._functorch.config
from torch import nn

from steplab.core import RunSpec
from steplab.core.errors import UserError
from steplab.modules.experts import Router
from steplab.step.assemble import assemble, micro_batches
from steplab.techniques.checkpointing import TECHNIQUE, recompute
from steplab.techniques.recipes import parse_recipe
from steplab.workloads.workload import find_workload
from tests.compare.sides import run_of


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


@contextlib.contextmanager
def allocated():
    """A function that returns the bytes of all storages made in the block that still live."""
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    made: dict[int, tuple[StorageWeakRef, int]] = {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            before, after = (storages(tree) for tree in ((args, kwargs), out))
            for address in after.keys() - before.keys():
                made[address] = StorageWeakRef(after[address]), after[address].nbytes()
            return out

    def storages(tree):
        tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        return {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}

    with Watch():
        yield lambda: sum(size for ref, size in made.values() if not ref.expired())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("how", ["blocks", "blocks,checkpointing.every=2", "selective"])
def test_weights_are_those_of_the_step_that_keeps_everything(precision, how):
    weights = []
    for more in ("", f",checkpointing={how}"):
        spec = tsmoe(f"precision={precision}{more}")
        step = assemble(spec)
        feed = micro_batches(step, spec)
        for _ in range(2):
            step(next(feed))
        weights.append({n: p.detach().clone() for n, p in step.model.named_parameters()})
    assert weights[0].keys() == weights[1].keys(), "names stay as they are"
    for name, kept in weights[0].items():
        assert torch.equal(kept, weights[1][name]), name


@pytest.mark.parametrize("selective", [False, True])
def test_running_statistics_move_once_a_step(selective):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x):
            return torch.tanh(self.norm(self.linear(x)))

    x, found = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), []
    for wanted in (False, True):
        torch.manual_seed(0)
        block = Block()
        recompute(block, wanted, rng=True, selective=selective)
        for _ in range(3):
            block(x).square().sum().backward()
        found.append(dict(block.named_buffers()) | {"gradient": block.norm.weight.grad})
    for name, kept in found[0].items():
        assert torch.equal(kept, found[1][name]), name


class DropsInAttention(nn.Module):
    """Random numbers before, within and after an attention whose result could be kept."""

    def __init__(self, share: float):
        super().__init__()
        self.share, self.linear = share, nn.Linear(8, 8)

    def forward(self, x_BTD):
        x_BHTD = self.linear(nn.functional.dropout(x_BTD, 0.3)).unsqueeze(1)
        y = nn.functional.scaled_dot_product_attention(x_BHTD, x_BHTD, x_BHTD, None, self.share)
        return nn.functional.dropout(torch.tanh(y.squeeze(1)), 0.5)


class ScaledAtRandom(nn.Module):
    """Its scale is drawn by Python or by numpy, before a tanh that keeps its result."""

    def __init__(self, draw):
        super().__init__()
        self.linear, self.draw = nn.Linear(8, 8), draw

    def forward(self, x):
        return x + torch.tanh(self.linear(x) * self.draw())


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["python", "numpy"])
@pytest.mark.parametrize("selective", [False, True])
def test_python_and_numpy_draw_the_same_numbers_again(draw, selective):
    x, found = torch.randn(4, 8), []
    for wanted in (False, True):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        blocks = nn.Sequential(ScaledAtRandom(draw), ScaledAtRandom(draw))
        for block in blocks:
            recompute(block, wanted, rng=True, selective=selective)
        blocks(x).square().sum().backward()
        found.append([*(p.grad for p in blocks.parameters()), torch.tensor(draw())])
    for kept, again in zip(*found, strict=True):
        assert torch.equal(kept, again)


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_selective_draws_the_same_random_numbers_again(share):
    """A fused attention is one operator that draws: skipping it would shift all that follow."""
    x, gradients = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0)), []
    for wanted in (False, True):
        torch.manual_seed(1)
        block = DropsInAttention(share)
        recompute(block, wanted, rng=True, selective=True)
        block(x).square().sum().backward()
        gradients.append(block.linear.weight.grad)
        after = torch.rand(1)
        gradients.append(after)
    assert torch.equal(gradients[0], gradients[2])
    assert torch.equal(gradients[1], gradients[3]), "the generator is left where it was"


def test_selective_multiplies_nothing_twice():
    """Counted by operators: every product and attention once forward, the rest again."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.calls = {}

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func._schema.name
            self.calls[name] = self.calls.get(name, 0) + 1
            return func(*args, **(kwargs or {}))

    counts = {}
    for recipe in ("plain", "checkpointing=selective", "checkpointing=blocks"):
        spec = tsmoe(recipe)
        step = assemble(spec)
        batch = next(micro_batches(step, spec))
        with Count() as count:
            step(batch)
        counts[recipe] = count.calls
    plain, selective, blocks = counts.values()
    products = [op for op in plain if op in ("aten::mm", "aten::addmm", "aten::bmm")]
    assert products and all(plain[op] == selective[op] for op in products)
    assert any(plain[op] < blocks[op] for op in products)
    assert any(selective[op] > plain[op] for op in plain), "something is computed again"


def test_results_that_are_kept_must_not_change_in_place():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x).relu_()

    block = Block()
    recompute(block, True, rng=True, selective=True)
    with pytest.raises(RuntimeError, match="mutated") as seen:
        block(torch.ones(2, 4)).sum().backward()
    run = replace(run_of(recipe={"checkpointing": {"how": "selective"}}), status="failed")
    assert "checkpointing=blocks" in TECHNIQUE.remedy(replace(run, reason=str(seen.value)))
    assert TECHNIQUE.remedy(replace(run, reason="something else")) == ""


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


def test_selective_keeps_less_than_everything(tiny_spec):
    """What one more block keeps, in widths a token; the feed-forward is two widths wide.

    Kept are q, k, v, attention and its projection, gate and value, the feed-forward's result, the
    block's output, and attention's sums (2 heads, one number of 32: 1/16).
    """
    kept = {}
    for recipe in ("plain", "checkpointing=selective", "checkpointing=blocks"):
        sizes = []
        for layers in (2, 3):
            spec = tiny_spec(recipe, {"layers": layers})
            step = assemble(spec)
            batch = next(micro_batches(step, spec))[0]
            with allocated() as alive:
                loss, _ = step.workload.loss(step.model, batch)
                sizes.append(alive())
            del loss
        kept[recipe] = (sizes[1] - sizes[0]) / (2 * 16 * 32 * 4)
    assert kept == {
        "plain": 19.125,
        "checkpointing=selective": 3 + 1 + 1 + 2 * 2 + 1 + 1 + 1 / 16,
        "checkpointing=blocks": 1.0,
    }


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


@pytest.mark.parametrize("scope", ["blocks", "whole"])
@pytest.mark.parametrize(
    "less", ["checkpointing=budget,checkpointing.keep=0.0", "checkpointing=elementwise"]
)
def test_what_the_compiler_recomputes_is_not_kept(tiny_spec, less, scope):
    kept, losses = [], []
    for more in ("", f",{less}"):
        torch._dynamo.reset()
        spec = tiny_spec(f"compile={scope},compile.backend=aot_eager{more}")
        step = assemble(spec)
        feed = micro_batches(step, spec)
        kept.append(saved_bytes(step, next(feed)[0]))
        losses.append([step(next(feed)).loss.item() for _ in range(2)])
    assert kept[1] < kept[0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("checkpointing=budget", "compile=blocks"),
        ("checkpointing=selective,compile=blocks", "op by op"),
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
