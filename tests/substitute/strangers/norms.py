"""Norms and feed-forwards in unusual spellings, and what only looks like them."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.substitute.strangers.case import TIME, VOCAB, WIDTH, Batch, Case

CASES: list[Case] = []
Layer = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Stream(nn.Module):
    """A residual stream x, an update of it, and a layer from outside that takes both."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.places = nn.Parameter(torch.randn(TIME, WIDTH))
        self.eps = nn.Parameter(torch.tensor(0.1))
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.down_half = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, VOCAB)
        self.batch_norm = nn.BatchNorm1d(TIME)

    def forward(self, words_BT: Tensor) -> Tensor:
        x = self.embed(words_BT)
        return self.out(self.layer(self, x, self.mix(x)))


def squares(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch[0]) * torch.linspace(-1, 1, VOCAB)).square().mean()


def case(replaced: bool = False, exact: float = 1e-9) -> Callable[[Layer], Layer]:
    def add(layer: Layer) -> Layer:
        model = partial(Stream, layer)
        CASES.append(Case(layer.__name__, model, squares, replaced, exact=exact))
        return layer

    return add


def root(x: Tensor, eps: float = 1e-5, dim: int = -1) -> Tensor:
    return torch.rsqrt(x.square().mean(dim, keepdim=True) + eps)


@case(replaced=True)
def rms(m, x, y):
    return x * root(x) * m.weight


@case(replaced=True)
def rms_of_the_stream(m, x, y):
    x = x + y
    return x + x * root(x) * m.weight


@case(replaced=True)
def torch_rms(m, x, y):
    return F.rms_norm(x + y, (WIDTH,), m.weight, 1e-6)


@case(replaced=True)
def one_plus_weight(m, x, y):
    return x * root(x) * (1 + m.weight)


@case()
def without_weight(m, x, y):
    return x * root(x + 0)


@case()
def eps_outside_the_root(m, x, y):
    return x / (x.square().mean(-1, keepdim=True).sqrt() + 0.1) * m.weight


@case()
def eps_after_rsqrt(m, x, y):
    return x * (torch.rsqrt(x.square().mean(-1, keepdim=True)) + 0.1) * m.weight


@case()
def learned_eps(m, x, y):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + m.eps.abs()) * m.weight


@case()
def large_eps_from_the_data(m, x, y):
    scale = x.square().mean(-1, keepdim=True)
    return x * torch.rsqrt(scale + scale.max()) * m.weight


@case()
def over_time(m, x, y):
    return x * root(x, dim=1) * m.weight


@case()
def sum_instead_of_mean(m, x, y):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-5) * m.weight


@case()
def absolute_values(m, x, y):
    return x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + 1e-5) * m.weight


@case()
def cubes(m, x, y):
    return x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + 1e-5) * m.weight


@case()
def root_of_another_tensor(m, x, y):
    return x * root(y) * m.weight


@case()
def root_without_gradient(m, x, y):
    return x * root(x).detach() * m.weight


@case()
def root_used_twice(m, x, y):
    scale = root(x)
    return x * scale * m.weight + scale


@case()
def first_half_only(m, x, y):
    return x * root(x[..., : WIDTH // 2]) * m.weight


@case()
def heads_normalized_apart(m, x, y):
    x = x.unflatten(-1, (4, 4))
    return (x * root(x)).flatten(2) * m.weight


@case(replaced=True)
def gated_after(m, x, y):
    return x * root(x) * m.weight * F.silu(y)


@case(replaced=True)
def gated_before(m, x, y):
    x = x * F.silu(y)
    return x * root(x) * m.weight


@case(replaced=True)
def centered_root(m, x, y):
    x = x - x.mean(-1, keepdim=True)
    return x * root(x) * m.weight


@case()
def unbiased_variance(m, x, y):
    x = x + y
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5) * m.weight


@case()
def weight_of_places(m, x, y):
    return x * root(x) * m.places


@case()
def weight_before_the_root(m, x, y):
    x = x * m.weight
    return x * root(x)


@case(replaced=True)
def layer_norm(m, x, y):
    return F.layer_norm(x + y, (WIDTH,), m.weight, m.bias)


@case(replaced=True)
def layer_norm_without_bias(m, x, y):
    return F.layer_norm(x + y, (WIDTH,), m.weight)


@case()
def layer_norm_without_anything(m, x, y):
    return F.layer_norm(x + y, (WIDTH,))


@case()
def layer_norm_of_time_and_width(m, x, y):
    return F.layer_norm(x + y, (TIME, WIDTH), m.places)


@case(replaced=True)
def places_added(m, x, y):
    return F.layer_norm(x + m.places, (WIDTH,), m.weight, m.bias)


@case(replaced=True)
def places_on_the_left(m, x, y):
    x = m.places + y
    return x + x * root(x) * m.weight


@case(replaced=True)
def half_of_the_update(m, x, y):
    x = torch.add(x, y, alpha=0.5)
    return x + F.layer_norm(x, (WIDTH,), m.weight, m.bias)


@case(replaced=True)
def stream_added_in_place(m, x, y):
    x = x.clone()
    x += y
    return F.layer_norm(x, (WIDTH,), m.weight, m.bias) + x


@case()
def update_changed_after_the_sum(m, x, y):
    total = x + y
    y.mul_(3)
    return F.rms_norm(total, (WIDTH,), m.weight, 1e-6) + y


@case(replaced=True)
def stream_added_to_itself(m, x, y):
    x = x + x
    return x + F.rms_norm(x, (WIDTH,), m.weight, 1e-6)


@case(replaced=True)
def same_norm_twice(m, x, y):
    x = F.rms_norm(x + y, (WIDTH,), m.weight, 1e-6)
    return F.rms_norm(x + y, (WIDTH,), m.weight, 1e-6)


@case()
def running_statistics(m, x, y):
    return m.batch_norm(x + y)


@case()
def group_norm(m, x, y):
    return F.group_norm((x + y).transpose(1, 2), 4, m.weight, m.bias).transpose(1, 2)


@case(replaced=True)
def norm_in_double(m, x, y):
    x = (x + y).double()
    return (x * root(x)).to(y.dtype) * m.weight


@case(replaced=True, exact=5e-2)
def norm_in_bf16(m, x, y):
    x = (x + y).bfloat16()
    return (x * root(x)).to(y.dtype) * m.weight


@case(replaced=True)
def gelu(m, x, y):
    return m.down(F.gelu(m.up(x)))


@case()
def gelu_by_tanh(m, x, y):
    return m.down(F.gelu(m.up(x), approximate="tanh"))


@case()
def gelu_on_a_half(m, x, y):
    left, right = m.up(x).chunk(2, -1)
    return m.down_half(F.gelu(left) * right)


@case()
def silu_on_the_other_half(m, x, y):
    left, right = m.up(x).chunk(2, -1)
    return m.down_half(left * F.silu(right))


@case()
def gelu_of_a_sum(m, x, y):
    return m.down(F.gelu(m.up(x) + m.up(y)))


@case()
def gelu_used_twice(m, x, y):
    z = F.gelu(m.up(x))
    return m.down(z) + z.mean()


@case()
def rows_changed_in_place_before_gelu(m, x, y):
    z = m.up(x)
    z.clamp_(max=0.5)
    return m.down(F.gelu(z))


@case(replaced=True)
def tied_down(m, x, y):
    return F.linear(F.gelu(m.up(x)), m.up.weight.T)


@case()
def gelu_twice(m, x, y):
    return m.down(F.gelu(F.gelu(m.up(x))))


@case(replaced=True)
def norm_without_gradient(m, x, y):
    with torch.no_grad():
        z = F.rms_norm(x + y, (WIDTH,), m.weight, 1e-6)
    return z * x


@case()
def sum_without_gradient(m, x, y):
    with torch.no_grad():
        z = x + y
    return F.layer_norm(z, (WIDTH,), m.weight, m.bias) * x


@case(replaced=True)
def feed_forward_without_gradient(m, x, y):
    with torch.no_grad():
        z = m.down(F.gelu(m.up(x)))
    return z * x


@case()
def rows_without_gradient(m, x, y):
    with torch.no_grad():
        z = m.up(x)
    return m.down(F.gelu(z))


@case()
def mapped_norm(m, x, y):
    return torch.vmap(lambda z: F.rms_norm(z, (WIDTH,), m.weight, 1e-6))(x + y)


@case()
def gradient_of_a_norm(m, x, y):
    def energy(z):
        return (F.rms_norm(z, (WIDTH,), m.weight, 1e-6) ** 3).sum()

    return torch.func.grad(energy)(x + y)
