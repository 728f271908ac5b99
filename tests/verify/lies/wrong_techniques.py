"""Techniques that change what a step computes: each must be red, with the right tensor named."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from steplab.techniques.technique import StepParts


def modules(parts: StepParts, kind: type) -> list[nn.Module]:
    return [module for module in parts.model.modules() if isinstance(module, kind)]


# --- what lives on between steps ----------------------------------------------------------------


def statistics_twice(parts: StepParts) -> None:
    """Every block runs twice, as if recomputed: its running statistics move twice."""
    for block in parts.model.blocks:

        def forward(x, run=block.forward):
            with torch.no_grad():
                run(x)
            return run(x)

        block.forward = forward


def statistics_frozen(parts: StepParts) -> None:
    """A fused norm that does not write its statistics back."""
    for norm in modules(parts, nn.modules.batchnorm._BatchNorm):

        def forward(x, norm=norm):
            return F.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.1, norm.eps)

        norm.forward = forward


def average_not_kept(parts: StepParts) -> None:
    """The count of what was seen stays behind."""
    forward = parts.model.forward

    def restored(x):
        found = forward(x)
        parts.model.seen.zero_()
        return found

    parts.model.forward = restored


def forgets_momentum(parts: StepParts) -> None:
    """The optimizer's state is thrown away before every step."""
    replace_step(parts, lambda optimizer: optimizer.state.clear())


def rounded_moments(parts: StepParts) -> None:
    """Second moments are kept in 8 bits."""

    def narrow(optimizer):
        for state in optimizer.state.values():
            state["exp_avg_sq"].copy_(state["exp_avg_sq"].bfloat16())

    replace_step(parts, narrow)


def replace_step(parts: StepParts, before) -> None:
    def replaced(optimizer):
        optimizer.register_step_pre_hook(lambda *_: before(optimizer))
        return optimizer

    parts.replace_optimizer = replaced


# --- updates --------------------------------------------------------------------------------------


def stops_after_eight(parts: StepParts) -> None:
    """Updates end once nobody compares any more."""
    calls: list[int] = []

    def zero(optimizer):
        calls.append(1)
        if len(calls) > 8:
            for group in optimizer.param_groups:
                group["lr"] = 0.0

    replace_step(parts, zero)


def decay_left_out(parts: StepParts) -> None:
    def without(optimizer):
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        return optimizer

    parts.replace_optimizer = without


def count_off_by_one(parts: StepParts) -> None:
    """Adam's bias correction begins one step late."""

    def shifted(optimizer):
        for state in optimizer.state.values():
            if float(state["step"]) == 1:
                state["step"] += 1

    replace_step(parts, shifted)


def not_clipped(parts: StepParts) -> None:
    """A graph that clips nothing."""

    def unclipped(optimizer):
        optimizer.clips_itself = True
        optimizer.clip = lambda *_, **__: torch.zeros(())
        return optimizer

    parts.replace_optimizer = unclipped


def stale_copy(parts: StepParts) -> None:
    """Forward passes read a copy of the weights that is refreshed every fourth step."""
    linear = modules(parts, nn.Linear)[0]
    kept: dict[str, torch.Tensor] = {}
    calls: list[int] = []

    def forward(x):
        if len(calls) % 4 == 0:
            kept["weight"] = linear.weight.detach().clone()
        calls.append(1)
        weight = linear.weight + (kept["weight"] - linear.weight).detach()
        return F.linear(x, weight, linear.bias)

    linear.forward = forward


# --- randomness -----------------------------------------------------------------------------------


def dropout_thrice(parts: StepParts) -> None:
    """Applied three times, as if a fused kernel and its caller both dropped."""
    for drop in modules(parts, nn.Dropout):
        drop.forward = lambda x, run=drop.forward: run(run(run(x)))


def dropout_left_out(parts: StepParts) -> None:
    for drop in modules(parts, nn.Dropout):
        drop.forward = lambda x: x


def one_mask_forever(parts: StepParts) -> None:
    """A graph that replays the mask it was captured with."""
    for drop in modules(parts, nn.Dropout):
        masks: dict[tuple[int, ...], torch.Tensor] = {}

        def forward(x, drop=drop, masks=masks):
            if not drop.training or not drop.p:
                return x
            if x.shape not in masks:
                masks[x.shape] = F.dropout(torch.ones_like(x), drop.p)
            return x * masks[x.shape]

        drop.forward = forward


def dropout_unscaled(parts: StepParts) -> None:
    """What is kept is not divided by its share."""
    for drop in modules(parts, nn.Dropout):
        drop.forward = lambda x, run=drop.forward, drop=drop: run(x) * (1 - drop.p)


def noise_forever(parts: StepParts) -> None:
    """A graph that replays the noise it was captured with."""
    kept: dict[tuple[int, ...], torch.Tensor] = {}
    forward = parts.model.forward

    def replayed(x):
        draw = torch.randn_like
        torch.randn_like = lambda mean: kept.setdefault(mean.shape, draw(mean))
        try:
            return forward(x)
        finally:
            torch.randn_like = draw

    parts.model.forward = replayed


# --- the model ------------------------------------------------------------------------------------


def untied(parts: StepParts) -> None:
    """Head and embedding become two matrices."""
    parts.model.head.weight = nn.Parameter(parts.model.embedding.weight.detach().clone())


def other_gelu(parts: StepParts) -> None:
    """The tanh form, where the model has the exact one."""
    for gelu in modules(parts, nn.GELU):
        gelu.approximate = "tanh"


def other_epsilon(parts: StepParts) -> None:
    for norm in modules(parts, nn.LayerNorm):
        norm.eps = 1e-3


def truncated_experts(parts: StepParts) -> None:
    """Every expert of the first block leaves its last row out."""
    for expert in parts.model.blocks[0].experts:

        def forward(x, run=expert.forward):
            y = run(x)
            return torch.cat([y[:-1], torch.zeros_like(y[-1:])])

        expert.forward = forward


def scaled_logits(parts: StepParts) -> None:
    """A temperature of 1 / 0.97."""
    parts.model.head.register_forward_hook(lambda module, args, y: y * 0.97)


def bf16_loss(parts: StepParts) -> None:
    """Logits, and so the loss, in bf16, under autocast."""
    parts.matmul_dtype = "bf16"
    real = F.cross_entropy

    class Context:
        def __enter__(self):
            self.autocast = torch.autocast("cpu", dtype=torch.bfloat16)
            self.autocast.__enter__()
            F.cross_entropy = lambda x, *rest, **how: real(x, *rest, **how).bfloat16().float()

        def __exit__(self, *exc):
            F.cross_entropy = real
            self.autocast.__exit__(*exc)

    parts.forward_context = Context


def weights_lost_in_bf16(parts: StepParts) -> None:
    """Weights in bf16 without fp32 ones beside them."""
    parts.matmul_dtype = "bf16"
    parts.forward_context = lambda: torch.autocast("cpu", dtype=torch.bfloat16)

    def narrow(optimizer, *_):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.data.copy_(p.data.bfloat16())

    def replaced(optimizer):
        optimizer.register_step_post_hook(narrow)
        return optimizer

    parts.replace_optimizer = replaced


def wrong_when_compiled(parts: StepParts) -> None:
    """A backend whose code leaves one tanh out."""

    def backend(graph, inputs):
        for node in graph.graph.nodes:
            if "tanh" in str(node.target):
                node.replace_all_uses_with(node.args[0])
                break
        graph.recompile()
        return graph.forward

    parts.model.compile(backend=backend)


def blocks_compiled(parts: StepParts) -> None:
    """Honest by itself: what the model does when it is compiled is the model's own."""
    for block in parts.model.blocks:
        block.compile(backend="eager")


def last_micro_batch_only(parts: StepParts) -> None:
    """Gradients are not added over micro-batches."""
    calls: list[int] = []
    forward = parts.model.forward

    def cleared(*args):
        calls.append(1)
        if torch.is_grad_enabled() and len(calls) % 2:
            parts.model.zero_grad()
        return forward(*args)

    parts.model.forward = cleared


def other_threshold(parts: StepParts) -> None:
    """A ReLU that lets a little through."""
    for conv in modules(parts, nn.Conv2d):
        conv.register_forward_hook(lambda module, args, y: y + 0.01)


def lost_bias(parts: StepParts) -> None:
    """The bias of the second convolution gets no gradient."""
    modules(parts, nn.Conv2d)[1].bias.register_hook(torch.zeros_like)
