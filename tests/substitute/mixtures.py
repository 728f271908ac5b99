"""Experts with the interface of transformers' registry, written by nobody who knows steplab.

`Experts` is the form that most mixtures have; the classes in `NEAR_MISSES` look like it and are
something else. `install` puts the registry where transformers would have it.
"""

# T tokens, K chosen experts, E experts, D width, F inner width
import sys
import types

import torch
import torch.nn.functional as F
from torch import nn

REGISTRY = "transformers.integrations.moe"


class Interface:
    """Names of implementations, and the functions behind them."""

    def __init__(self):
        self.functions = {}

    def register(self, name, function):
        self.functions[name] = function


def install(monkeypatch):
    """Make the registry importable under transformers' name, and return it."""
    interface = Interface()
    for name in ("transformers", "transformers.integrations", REGISTRY):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[REGISTRY].ALL_EXPERTS_FUNCTIONS = interface
    monkeypatch.setattr(Experts, "interface", interface)
    return interface


class Config:
    def __init__(self, implementation="eager"):
        self._experts_implementation = implementation


class Experts(nn.Module):
    interface = Interface()

    def __init__(self, config, experts=4, width=16, inner=24):
        super().__init__()
        self.config = config
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * inner, width) * width**-0.5)
        self.down_proj = nn.Parameter(torch.randn(experts, width, inner) * inner**-0.5)
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states, top_k_index, top_k_weights):
        name = self.config._experts_implementation
        arguments = (hidden_states, top_k_index, top_k_weights)
        return (
            self.eager(*arguments)
            if name == "eager"
            else self.interface.functions[name](self, *arguments)
        )

    def _apply_gate(self, both):
        gate, up = both.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def eager(self, hidden_states, top_k_index, top_k_weights):
        total = torch.zeros_like(hidden_states)
        for number in range(self.gate_up_proj.shape[0]):
            token, place = (top_k_index == number).nonzero(as_tuple=True)
            inner = self._apply_gate(F.linear(hidden_states[token], self.gate_up_proj[number]))
            rows = F.linear(inner, self.down_proj[number]) * top_k_weights[token, place, None]
            total.index_add_(0, token, rows.to(total.dtype))
        return total


class Mixture(nn.Module):
    """A router and experts for every layer, as a small model."""

    def __init__(self, config, *kinds, width=16, chosen=2):
        super().__init__()
        self.config, self.chosen = config, chosen
        self.routers = nn.ModuleList(nn.Linear(width, 4, bias=False) for _ in kinds)
        self.experts = nn.ModuleList(kind(config) for kind in kinds)

    def forward(self, x_TD):
        for router, experts in zip(self.routers, self.experts, strict=True):
            scores, chosen = router(x_TD).float().softmax(-1).topk(self.chosen)
            scores /= scores.sum(-1, keepdim=True)
            x_TD = x_TD + experts(x_TD, chosen, scores.to(x_TD.dtype))
        return x_TD


class GeluGate(Experts):
    def _apply_gate(self, both):
        gate, up = both.chunk(2, dim=-1)
        return F.gelu(gate) * up


class TanhGeluGate(GeluGate):
    def _apply_gate(self, both):
        gate, up = both.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up


class SteeperGate(Experts):
    def _apply_gate(self, both):
        gate, up = both.chunk(2, dim=-1)
        return gate * torch.sigmoid(1.001 * gate) * up


class UpFirst(Experts):
    def _apply_gate(self, both):
        up, gate = both.chunk(2, dim=-1)
        return self.act_fn(gate) * up


class Interleaved(Experts):
    def _apply_gate(self, both):
        return self.act_fn(both[..., ::2]) * both[..., 1::2]


class OneMore(Experts):
    def _apply_gate(self, both):
        gate, up = both.chunk(2, dim=-1)
        return self.act_fn(gate) * (up + 1)


class Bounded(Experts):
    limit = 7.0

    def _apply_gate(self, both):
        gate, up = both.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


class BoundedFarOut(Bounded):
    limit = 100.0


class WithBias(Experts):
    def __init__(self, config):
        super().__init__(config)
        self.down_bias = nn.Parameter(torch.zeros(4, 16))

    def eager(self, hidden_states, top_k_index, top_k_weights):
        total = super().eager(hidden_states, top_k_index, top_k_weights)
        return total + (self.down_bias[top_k_index] * top_k_weights[..., None]).sum(1)


class Transposed(Experts):
    def __init__(self, config, width=16, inner=24):
        super().__init__(config, width=width, inner=inner)
        self.gate_up_proj = nn.Parameter(self.gate_up_proj.detach().transpose(1, 2).contiguous())

    def eager(self, hidden_states, top_k_index, top_k_weights):
        both = torch.einsum("td,edf->tef", hidden_states, self.gate_up_proj)
        rows = torch.einsum("tef,edf->ted", self._apply_gate(both), self.down_proj)
        index = top_k_index[..., None].expand(-1, -1, rows.shape[-1])
        return (rows.gather(1, index) * top_k_weights[..., None]).sum(1).to(hidden_states)


class SquareTransposed(Transposed):
    def __init__(self, config):
        super().__init__(config, width=24, inner=12)


class WeightsAgain(Experts):
    def eager(self, hidden_states, top_k_index, top_k_weights):
        return super().eager(hidden_states, top_k_index, top_k_weights.softmax(-1))


class WeighsTokens(Experts):
    def eager(self, hidden_states, top_k_index, top_k_weights):
        ones = torch.ones_like(top_k_weights)
        return super().eager(hidden_states * top_k_weights[:, :1], top_k_index, ones)


class DropsTheLast(Experts):
    def eager(self, hidden_states, top_k_index, top_k_weights):
        kept = top_k_weights * (top_k_index < 3)
        return super().eager(hidden_states, top_k_index, kept)


class AddsTheInput(Experts):
    def eager(self, hidden_states, top_k_index, top_k_weights):
        return hidden_states + super().eager(hidden_states, top_k_index, top_k_weights)


class NoGradientToTheRouter(Experts):
    def eager(self, hidden_states, top_k_index, top_k_weights):
        return super().eager(hidden_states, top_k_index, top_k_weights.detach())


class WithBuffer(Experts):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("scale", torch.ones(()))

    def eager(self, *arguments):
        return super().eager(*arguments) * self.scale


class SpreadOverRanks(Experts):
    _is_expert_parallel = True


class Wide(Experts):
    """Returns fp32 whatever it is given."""

    def eager(self, hidden_states, top_k_index, top_k_weights):
        total = super().eager(hidden_states, top_k_index, top_k_weights)
        return total if total.dtype == torch.float64 else total.float() + 0


# Each with words of the reason why it is left alone.
NEAR_MISSES = {
    GeluGate: "not the same",
    TanhGeluGate: "not the same",
    SteeperGate: "not the same",
    UpFirst: "not the same",
    Interleaved: "not the same",
    OneMore: "not the same",
    Bounded: "not the same",
    BoundedFarOut: "not the same",
    WithBias: "it holds down_bias",
    Transposed: "not (E, 2F, D)",
    SquareTransposed: "not the same",
    WeightsAgain: "not the same",
    WeighsTokens: "not the same",
    DropsTheLast: "not the same",
    AddsTheInput: "not the same",
    NoGradientToTheRouter: "not the same",
    WithBuffer: "and not just",
    SpreadOverRanks: "spread over ranks",
}
