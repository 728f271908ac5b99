"""Techniques that change what a step computes: each must be red, with the right tensor named."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

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


def statistics_stop_after_eight(parts: StepParts) -> None:
    """Running statistics end once nobody compares any more: nine passes, one of a prediction."""
    for norm in modules(parts, nn.modules.batchnorm._BatchNorm):
        calls: list[int] = []

        def forward(x, norm=norm, calls=calls, run=norm.forward):
            calls.append(1)
            if len(calls) <= 9:
                return run(x)
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


def unseen_as_zero(parts: StepParts) -> None:
    """What was not seen yet is zero instead of NaN."""
    parts.model.best.nan_to_num_()


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


def smaller_decay_in_bf16(parts: StepParts) -> None:
    """A decay of which a third is left: gradients in bf16 are farther off than that."""
    in_bf16_with(parts, lambda group: group.update(weight_decay=group["weight_decay"] / 3))


def other_eps_in_bf16(parts: StepParts) -> None:
    in_bf16_with(parts, lambda group: group.update(eps=1e-6))


def in_bf16_with(parts: StepParts, change) -> None:
    parts.matmul_dtype = "bf16"
    parts.forward_context = lambda: torch.autocast("cpu", dtype=torch.bfloat16)

    def changed(optimizer):
        for group in optimizer.param_groups:
            change(group)
        return optimizer

    parts.replace_optimizer = changed


def decay_stops_after_eight(parts: StepParts) -> None:
    """Weight decay ends once nobody compares any more."""
    calls: list[int] = []

    def stop(optimizer):
        calls.append(1)
        if len(calls) > 8:
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.0

    replace_step(parts, stop)


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


def clipped_one_by_one(parts: StepParts) -> None:
    """Every gradient is clipped by its own norm, not by that of all."""

    def one_by_one(optimizer):
        def clip(*_, **__):
            for group in optimizer.param_groups:
                for p in group["params"]:
                    nn.utils.clip_grad_norm_([p], 1.0)
            return torch.zeros(())

        optimizer.clips_itself, optimizer.clip = True, clip
        return optimizer

    parts.replace_optimizer = one_by_one


def rounded_gradients(parts: StepParts) -> None:
    """Gradients travel in bf16 where the recipe says fp32."""
    for p in parts.model.parameters():
        p.register_hook(lambda gradient: gradient.bfloat16().to(gradient.dtype))


def idle_rows_stay(parts: StepParts) -> None:
    """A sparse update: rows of the embedding that no token chose keep still, momentum or not."""
    weight = parts.model.embedding.weight
    before: dict[str, torch.Tensor] = {}

    def look(*_):
        before["idle"], before["weight"] = weight.grad.abs().sum(1) == 0, weight.detach().clone()

    def restore(*_):
        weight.data[before["idle"]] = before["weight"][before["idle"]]

    def sparse(optimizer):
        optimizer.register_step_pre_hook(look)
        optimizer.register_step_post_hook(restore)
        return optimizer

    parts.replace_optimizer = sparse


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


def other_rate(parts: StepParts) -> None:
    """A quarter is dropped instead of a fifth, and scaled as it should be then."""
    for drop in modules(parts, nn.Dropout):
        drop.forward = lambda x, drop=drop: F.dropout(x, 0.25, drop.training)


def rows_share_a_mask(parts: StepParts) -> None:
    """A kernel that counts its random numbers from zero for every row."""
    for drop in modules(parts, nn.Dropout):
        drop.forward = lambda x, drop=drop: x * F.dropout(x.new_ones(x[:1].shape), drop.p)


def other_mask_in_backward(parts: StepParts) -> None:
    """Blocks are recomputed with whatever the generator gives by then."""
    for block in parts.model.blocks:
        block.forward = lambda x, run=block.forward: checkpoint(
            run, x, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
        )


def every_mask_twice(parts: StepParts) -> None:
    """A generator that is advanced every other step."""
    for drop in modules(parts, nn.Dropout):
        masks: list[torch.Tensor] = []

        def forward(x, drop=drop, masks=masks):
            if not drop.training or not drop.p:
                return x
            fresh = F.dropout(torch.ones_like(x), drop.p)
            masks.append(masks[-1] if len(masks) % 2 else fresh)
            return x * masks[-1]

        drop.forward = forward


def every_step_the_same(parts: StepParts) -> None:
    """Every pass gives the generator back as it found it."""
    parts.forward_context = lambda: torch.random.fork_rng(devices=[])


def seeded_after_steps(parts: StepParts) -> None:
    def seeded(optimizer):
        optimizer.register_step_post_hook(lambda *_: torch.manual_seed(0))
        return optimizer

    parts.replace_optimizer = seeded


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


def wrong_every_fifth_time(parts: StepParts) -> None:
    """A race: now and then the last row of a product is not written."""
    calls: list[int] = []

    def race(module, args, y):
        calls.append(1)
        return y if len(calls) % 5 else torch.cat([y[:-1], torch.zeros_like(y[-1:])])

    modules(parts, nn.Linear)[0].register_forward_hook(race)


def first_result_forever(parts: StepParts) -> None:
    """A graph whose inputs are never copied in: it replays the first batch."""
    kept: dict[str, torch.Tensor] = {}
    forward = parts.model.forward
    parts.model.forward = lambda x: kept.setdefault("y", forward(x))


def other_ids(parts: StepParts) -> None:
    """Scores are those of the next word: every id is wrong."""
    parts.model.head.register_forward_hook(lambda module, args, y: y.roll(1, -1))


def frozen_metrics(parts: StepParts) -> None:
    """A graph whose metrics are those of the step in which it was captured."""
    kept: dict[str, torch.Tensor] = {}

    def wrap(loss):
        def frozen(model, batch):
            output = loss(model, batch)
            metrics = {n: kept.setdefault(n, m.detach()) for n, m in output.metrics.items()}
            return output._replace(metrics=metrics)

        return frozen

    parts.wrap_forward = wrap


def metrics_stop_after_eight(parts: StepParts) -> None:
    """Metrics end once nobody compares any more: nine passes, one of a prediction."""
    seen: list[dict[str, torch.Tensor]] = []

    def wrap(loss):
        def stopped(model, batch):
            output = loss(model, batch)
            seen.append({name: metric.detach() for name, metric in output.metrics.items()})
            return output._replace(metrics=seen[min(len(seen), 9) - 1])

        return stopped

    parts.wrap_forward = wrap


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


def lost_row(parts: StepParts) -> None:
    """Under bf16 one token of the embedding learns nothing."""
    parts.matmul_dtype = "bf16"
    parts.forward_context = lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    keep = torch.arange(32)[:, None] != 7
    parts.model.embedding.weight.register_hook(lambda gradient: gradient * keep)


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
