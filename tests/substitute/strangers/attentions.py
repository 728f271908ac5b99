"""Attention: masks and repeated heads in unusual spellings, and what only looks like them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.substitute.strangers.case import HEADS, THREE_STEPS, VOCAB, WIDTH, Batch, Case, Shapes

CASES: list[Case] = []
Attend = Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor], Tensor]


class Heads(nn.Module):
    """Queries of 4 heads, keys and values of `kv` heads, and an attention from outside."""

    def __init__(self, attend: Attend, kv: int = HEADS) -> None:
        super().__init__()
        self.attend, self.kv, self.size = attend, kv, WIDTH // HEADS
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.queries = nn.Linear(WIDTH, WIDTH)
        self.keys = nn.Linear(WIDTH, kv * self.size)
        self.values = nn.Linear(WIDTH, kv * self.size)
        self.out = nn.Linear(WIDTH, VOCAB)
        self.bias = nn.Parameter(0.1 * torch.randn(32, 32))
        self.slope = nn.Parameter(torch.rand(HEADS, 1, 1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("triangle", torch.ones(32, 32).tril().bool())

    def forward(self, words_BT: Tensor) -> Tensor:
        x = self.embed(words_BT)
        B, T, _ = x.shape
        q = self.queries(x).view(B, T, HEADS, self.size).transpose(1, 2)
        k = self.keys(x).view(B, T, self.kv, self.size).transpose(1, 2)
        v = self.values(x).view(B, T, self.kv, self.size).transpose(1, 2)
        return self.out(self.attend(self, words_BT, q, k, v).transpose(1, 2).flatten(2))


def squares(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch[0]) * torch.linspace(-1, 1, VOCAB)).square().mean()


def case(
    replaced: bool = False, kv: int = HEADS, shapes: Shapes = THREE_STEPS
) -> Callable[[Attend], Attend]:
    def add(attend: Attend) -> Attend:
        CASES.append(Case(attend.__name__, lambda: Heads(attend, kv), squares, replaced, shapes))
        return attend

    return add


sdpa = F.scaled_dot_product_attention


def lower(q: Tensor, diagonal: int = 0) -> Tensor:
    return torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril(diagonal)


def hidden_by(mask: Tensor, q: Tensor, value: float) -> Tensor:
    return torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, value)


@case(replaced=True)
def triangle(m, x, q, k, v):
    return sdpa(q, k, v, lower(q))


@case(replaced=True)
def minus_infinity(m, x, q, k, v):
    return sdpa(q, k, v, hidden_by(lower(q), q, -torch.inf))


@case(replaced=True)
def lowest_number(m, x, q, k, v):
    return sdpa(q, k, v, hidden_by(lower(q), q, torch.finfo(q.dtype).min))


@case()
def minus_ten_leaks(m, x, q, k, v):
    return sdpa(q, k, v, hidden_by(lower(q), q, -10.0))


@case(replaced=True)
def positions_compared(m, x, q, k, v):
    at = torch.arange(q.shape[-2])
    return sdpa(q, k, v, (at[:, None] >= at)[None, None])


@case()
def triangle_made_in_place(m, x, q, k, v):
    mask = torch.ones(q.shape[-2], q.shape[-2])
    mask.tril_()
    return sdpa(q, k, v, mask.bool())


@case()
def ones_and_zeros_are_added(m, x, q, k, v):
    return sdpa(q, k, v, lower(q).to(q.dtype))


@case()
def upper_triangle(m, x, q, k, v):
    return sdpa(q, k, v, lower(q).T)


@case()
def window(m, x, q, k, v):
    return sdpa(q, k, v, lower(q) & ~lower(q, -3))


@case(replaced=True)
def window_as_long_as_the_text(m, x, q, k, v):
    return sdpa(q, k, v, lower(q) & ~lower(q, -q.shape[-2]))


@case()
def prefix(m, x, q, k, v):
    return sdpa(q, k, v, lower(q) | (torch.arange(q.shape[-2]) < 2))


@case()
def documents(m, x, q, k, v):
    document = (x == 0).cumsum(-1)
    same = document[:, None, :, None] == document[:, None, None, :]
    return sdpa(q, k, v, same & lower(q))


@case()
def packed_positions(m, x, q, k, v):
    at = torch.arange(q.shape[-2]) % 3
    return sdpa(q, k, v, lower(q) & (at[:, None] >= at))


@case()
def padding(m, x, q, k, v):
    return sdpa(q, k, v, lower(q) & ((x > 3) | (x == x[:, :1]))[:, None, None])


@case()
def one_odd_entry_shown(m, x, q, k, v):
    mask = lower(q)
    mask[1, 3] = True
    return sdpa(q, k, v, mask)


@case()
def one_odd_entry_hidden(m, x, q, k, v):
    mask = lower(q)
    mask[4, 2] = False
    return sdpa(q, k, v, mask)


@case()
def one_ahead(m, x, q, k, v):
    return sdpa(q, k, v, lower(q, 1))


@case()
def strictly_before(m, x, q, k, v):
    return sdpa(q, k, v, hidden_by(lower(q, -1), q, -100.0))


@case()
def one_head_sees_all(m, x, q, k, v):
    heads = torch.arange(HEADS).view(-1, 1, 1)
    return sdpa(q, k, v, (lower(q) | (heads == 2))[None])


@case()
def alibi(m, x, q, k, v):
    at = torch.arange(q.shape[-2])
    slopes = 2.0 ** -torch.arange(1, HEADS + 1).view(-1, 1, 1)
    distance = (at - at[:, None]).to(q.dtype)
    return sdpa(q, k, v, (slopes * distance).to(q.dtype) + hidden_by(lower(q), q, -torch.inf))


@case()
def learned_bias(m, x, q, k, v):
    T = q.shape[-2]
    return sdpa(q, k, v, m.bias[:T, :T] + hidden_by(lower(q), q, -torch.inf))


@case()
def learned_slopes(m, x, q, k, v):
    at = torch.arange(q.shape[-2])
    mask = m.slope * (at - at[:, None]) + hidden_by(lower(q), q, -torch.inf)
    return sdpa(q, k, v, mask)


@case()
def bias_that_is_zero_now(m, x, q, k, v):
    T = q.shape[-2]
    return sdpa(q, k, v, 0 * m.bias[:T, :T] + hidden_by(lower(q), q, -torch.inf))


@case()
def triangle_in_a_buffer(m, x, q, k, v):
    return sdpa(q, k, v, m.triangle[: q.shape[-2], : q.shape[-2]])


@case()
def buffer_that_widens(m, x, q, k, v):
    m.calls += 1
    at = torch.arange(q.shape[-2])
    return sdpa(q, k, v, at[:, None] + m.calls - 1 >= at)


@case()
def random_glimpses(m, x, q, k, v):
    return sdpa(q, k, v, lower(q) | (torch.rand(q.shape[-2], q.shape[-2]) > 0.9))


@case()
def random_that_never_hits(m, x, q, k, v):
    return sdpa(q, k, v, lower(q) | (torch.rand(q.shape[-2], q.shape[-2]) > 2))


@case(replaced=True)
def mask_that_hides_nothing(m, x, q, k, v):
    return sdpa(q, k, v, torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool))


@case()
def no_mask_at_all(m, x, q, k, v):
    return sdpa(q, k, v)


@case(replaced=True)
def other_scale(m, x, q, k, v):
    return sdpa(q, k, v, lower(q), scale=0.3)


@case(replaced=True)
def scale_of_queries_too(m, x, q, k, v):
    return sdpa(q * 2, k, v, hidden_by(lower(q), q, -torch.inf) * 2, scale=0.2)


@case(replaced=True)
def normalized_queries_and_keys(m, x, q, k, v):
    return sdpa(F.normalize(q, dim=-1) * 3, F.normalize(k, dim=-1), v, lower(q))


@case()
def cached_keys_bottom_right(m, x, q, k, v):
    mask = torch.ones(q.shape[-2] - 2, k.shape[-2], dtype=torch.bool).tril(2)
    return F.pad(sdpa(q[:, :, 2:], k, v, mask), (0, 0, 2, 0))


@case()
def wide_and_top_left(m, x, q, k, v):
    mask = torch.ones(q.shape[-2] - 2, k.shape[-2], dtype=torch.bool).tril()
    return F.pad(sdpa(q[:, :, 2:], k, v, mask), (0, 0, 2, 0))


@case()
def written_out(m, x, q, k, v):
    scores = (q @ k.transpose(-1, -2)) * m.size**-0.5
    return scores.masked_fill(~lower(q), -torch.inf).float().softmax(-1).to(q.dtype) @ v


@case(replaced=True, kv=2)
def repeated_side_by_side(m, x, q, k, v):
    return sdpa(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True)


@case(replaced=True, kv=2)
def expanded_and_folded(m, x, q, k, v):
    k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for t in (k, v))
    return sdpa(q, k, v, lower(q))


@case(replaced=True, kv=2)
def expanded_in_the_wrong_order(m, x, q, k, v):
    k, v = (t[:, None].expand(-1, 2, -1, -1, -1).flatten(1, 2) for t in (k, v))
    return sdpa(q, k, v, lower(q))


@case(kv=2)
def tiled(m, x, q, k, v):
    return sdpa(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), is_causal=True)


@case(kv=2)
def keys_tiled_values_interleaved(m, x, q, k, v):
    return sdpa(q, k.repeat(1, 2, 1, 1), v.repeat_interleave(2, 1), is_causal=True)


@case(kv=2)
def repeated_along_time(m, x, q, k, v):
    k, v = (t.repeat_interleave(2, 2).view(t.shape[0], 4, t.shape[2], -1) for t in (k, v))
    return sdpa(q, k, v, is_causal=True)


@case(replaced=True, kv=2)
def picked_by_index(m, x, q, k, v):
    return sdpa(q, k[:, [0, 0, 1, 1]], v[:, [0, 0, 1, 1]], is_causal=True)


@case(kv=2)
def picked_unevenly(m, x, q, k, v):
    return sdpa(q, k[:, [0, 0, 0, 1]], v[:, [0, 0, 0, 1]], is_causal=True)


@case(replaced=True, kv=1)
def one_head_expanded(m, x, q, k, v):
    return sdpa(q, k.expand(-1, HEADS, -1, -1), v.expand(-1, HEADS, -1, -1), lower(q))


@case(replaced=True, kv=2)
def keys_scaled_after_the_repeat(m, x, q, k, v):
    k = k.repeat_interleave(2, 1) * m.slope
    return sdpa(q, k, v.repeat_interleave(2, 1), lower(q))


@case(replaced=True, kv=2)
def repeated_keys_used_again(m, x, q, k, v):
    k = k.repeat_interleave(2, 1)
    return sdpa(q, k, v.repeat_interleave(2, 1), lower(q)) + k


@case(kv=2)
def repeated_keys_changed_in_place(m, x, q, k, v):
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    k[:, 1].mul_(2)
    return sdpa(q, k, v, is_causal=True)


@case(kv=2)
def short_keys_changed_after_the_repeat(m, x, q, k, v):
    k = k.contiguous()
    long = k.repeat_interleave(2, 1)
    k.mul_(3)
    return sdpa(q, long, v.repeat_interleave(2, 1), is_causal=True) + k.mean()


@case(replaced=True, kv=2)
def grouped_already(m, x, q, k, v):
    return sdpa(q, k, v, lower(q), enable_gqa=True)


@case(replaced=True)
def called_twice(m, x, q, k, v):
    mask = lower(q)
    return sdpa(sdpa(q, k, v, mask), k, v, mask)


@case()
def mask_changed_between_two_calls(m, x, q, k, v):
    mask = lower(q)
    first = sdpa(q, k, v, mask)
    mask[0, 1] = True
    return sdpa(first, k, v, mask)


@case()
def mask_used_elsewhere(m, x, q, k, v):
    mask = hidden_by(lower(q), q, -50.0)
    return sdpa(q, k, v, mask) * mask.exp().mean()


@case(shapes=((1, 1),) * 3)
def one_token(m, x, q, k, v):
    return sdpa(q, k, v, lower(q))


@case(replaced=True, shapes=((2, 6), (3, 5), (2, 9), (1, 4)))
def lengths_that_change(m, x, q, k, v):
    return sdpa(q, k, v, lower(q))


@case(replaced=True, shapes=((2, 3), (2, 6), (2, 9), (2, 4)))
def window_that_bites_when_longer(m, x, q, k, v):
    return sdpa(q, k, v, lower(q) & ~lower(q, -4))


@case(replaced=True)
def values_wider_than_keys(m, x, q, k, v):
    return sdpa(q[..., :2], k[..., :2], v, lower(q))


@case(replaced=True)
def attention_without_gradient(m, x, q, k, v):
    with torch.no_grad():
        seen = sdpa(q, k, v, lower(q))
    return seen * v


@case(kv=2)
def keys_without_gradient(m, x, q, k, v):
    with torch.no_grad():
        k = k.repeat_interleave(2, 1)
    return sdpa(q, k, v.repeat_interleave(2, 1), is_causal=True)


@case()
def mapped_over_the_batch(m, x, q, k, v):
    mask = lower(q)
    return torch.vmap(lambda q, k, v: sdpa(q, k, v, mask))(q, k, v)
