"""Models with a fault in a path of their own: the plain fp32 step never shows it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import steplab
from tests.verify.lies.honest_models import (
    Attention,
    Language,
    Stack,
    classify,
    next_token,
    tokens,
    vectors,
)


def is_narrow(x) -> bool:
    """Whether a tensor is 16-bit, or will be by autocast."""
    return x.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled(x.device.type)


def loss_scaled():
    """The loss is a fifth larger in bf16."""

    def loss(model, batch):
        found = next_token(model, batch)
        return found * 1.2 if is_narrow(found) else found

    return steplab.UserModel(Language(), tokens, loss)


def loss_summed_in_bf16():
    """One term after another into a 16-bit sum, which stops growing."""

    def loss(model, batch):
        logits = model(batch[:, :-1]).flatten(0, 1)
        terms = F.cross_entropy(logits, batch[:, 1:].flatten(), reduction="none")
        if not is_narrow(logits):
            return terms.mean()
        total = terms.new_zeros((), dtype=torch.bfloat16)
        for term in terms.bfloat16():
            total = total + term
        return total.float() / len(terms)

    return steplab.UserModel(Language(), tokens, loss)


def loss_read_in_bf16():
    """Right, but for its last rounding: a curve of a few steps."""

    def loss(model, batch):
        found = next_token(model, batch)
        return found.bfloat16().float() if is_narrow(found) else found

    return steplab.UserModel(Language(), tokens, loss)


class WrongScale(Attention):
    """Divides by the width where it runs in bf16."""

    def forward(self, x):
        if not is_narrow(x):
            return super().forward(x)
        B, T, D = x.shape
        q, k, v = self.qkv(self.norm(x)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / q.shape[-1])
        x = x + self.out(mixed.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def language(block):
    model = Language()
    model.blocks = nn.ModuleList(block(32) for _ in range(2))
    return steplab.UserModel(model, tokens, next_token)


def attention_scale():
    return language(WrongScale)


class SeesTheFuture(Attention):
    """Its bf16 kernel forgets the causal mask."""

    def forward(self, x):
        if not is_narrow(x):
            return super().forward(x)
        B, T, D = x.shape
        q, k, v = self.qkv(self.norm(x)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def attention_without_mask():
    return language(SeesTheFuture)


class WrongBackward(torch.autograd.Function):
    """A product whose weight gradient is a quarter too small in bf16."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        share = 0.75 if x.dtype == torch.bfloat16 else 1.0
        return grad @ weight, share * (grad.flatten(0, -2).T @ x.flatten(0, -2))


class WrongLinear(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x):
        if is_narrow(x):
            y = WrongBackward.apply(x.bfloat16(), self.weight.bfloat16())
        else:
            y = WrongBackward.apply(x, self.weight)
        return x + torch.tanh(y).to(x.dtype)


def backward_of_a_product():
    return steplab.UserModel(Stack(WrongLinear), vectors(16), classify)


class CoarseNorm(nn.Module):
    """The variance of a norm without its mean subtracted, where it runs in bf16."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = self.linear(x)
        if is_narrow(x):
            spread = y.square().mean(-1, keepdim=True)
        else:
            spread = y.var(-1, unbiased=False, keepdim=True)
        return x + self.gain * (y - y.mean(-1, keepdim=True)) / (spread + 1e-5).sqrt()


def variance_of_a_norm():
    return steplab.UserModel(Stack(CoarseNorm), vectors(16), classify)


class LostTail(Attention):
    """A bf16 kernel in tiles of eight rows that leaves the last tile out."""

    def forward(self, x):
        y = super().forward(x)
        return torch.cat([y[:, :-8], x[:, -8:].to(y.dtype)], 1) if is_narrow(x) else y


def lost_tail():
    return language(LostTail)


class LostResidual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        return y if is_narrow(x) else x + y


def lost_residual():
    return steplab.UserModel(Stack(LostResidual), vectors(16), classify)


class StuckBuffer(nn.Module):
    """A moving average in bf16 with a share so small that it never moves."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("mean", torch.ones(width))

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        with torch.no_grad():
            now = y.mean(0)
            if is_narrow(x):
                self.mean.copy_(self.mean.bfloat16().lerp(now.bfloat16(), 1e-3))
            else:
                self.mean.lerp_(now.to(self.mean.dtype), 1e-3)
        return x + y


def stuck_buffer():
    return steplab.UserModel(Stack(StuckBuffer), vectors(16), classify)


class OtherWhenCompiled(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        return x + (0.9 * y if torch.compiler.is_compiling() and not self.training else y)


def other_when_compiled():
    """Compiled, it predicts something else than it is trained for."""

    def predict(model, batch):
        model.eval()
        found = model(batch[0])
        model.train()
        return found

    return steplab.UserModel(Stack(OtherWhenCompiled), vectors(16), classify, predict=predict)


class ForgottenExpert(nn.Module):
    """The last expert of a bf16 path gets no tokens."""

    def __init__(self, width):
        super().__init__()
        self.router = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        weight, chosen = self.router(x).float().softmax(-1).topk(2, -1)
        gates = torch.zeros(*x.shape[:-1], 4, dtype=weight.dtype).scatter(-1, chosen, weight)
        used = list(enumerate(self.experts))[: 3 if is_narrow(x) else 4]
        return x + torch.tanh(sum(gates[:, e, None] * expert(x) for e, expert in used))


def forgotten_expert():
    return steplab.UserModel(Stack(ForgottenExpert), vectors(16), classify)


def coarse_logits():
    """Logits clamped to a range that only the narrow path has."""

    def loss(model, batch):
        x, target = batch
        logits = 8 * model(x)
        if is_narrow(logits):
            logits = logits.clamp(-3, 3)
        return F.cross_entropy(logits, target)

    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    return steplab.UserModel(net, vectors(16), loss)
