"""Losses, attentions and norms that look like those a rewrite knows, and some that are.

Each is a function of tensors that Dynamo traces. The second item says what may happen: "same" must
be replaced, "alone" must be left alone, "right" may be either. Whatever happens, value and
gradients must be those of the function itself.
"""

# B batch, T tokens, H heads, G heads of keys, D width, V vocabulary
import math

import torch
import torch.nn.functional as F

B, T, D, V = 3, 10, 12, 31
H, G, S = 4, 2, 10
ALONE, SAME, RIGHT = "alone", "same", "right"
FLOAT = torch.float64  # of the inputs: torch's attention misreads an fp32 mask beside them


def flat(x, w, y, **options):
    return F.cross_entropy(F.linear(x, w).view(-1, V), y.view(-1), **options)


def twice(x, w, y):
    logits = F.linear(x, w).view(-1, V)
    return F.cross_entropy(logits, y.view(-1)) + logits.logsumexp(-1).square().mean() * 1e-4


def accuracy(x, w, y):
    logits = F.linear(x, w).view(-1, V)
    right = (logits.argmax(-1) == y.view(-1)).float().mean()
    return F.cross_entropy(logits, y.view(-1)) + 0 * right


def by_mask(x, w, y):
    losses = F.cross_entropy(F.linear(x, w).view(-1, V), y.view(-1), reduction="none")
    keep = (y.view(-1) != 3).float()
    return (losses * keep).sum() / keep.sum()


def shifted(x, w, y):
    logits = F.linear(x, w)[:, :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, V), y[:, 1:].reshape(-1))


def changed_logits(x, w, y):
    logits = F.linear(x, w).view(-1, V)
    logits[:, 0] = -1e4
    return F.cross_entropy(logits, y.view(-1))


def changed_input(x, w, y):
    h = x * 1.0
    logits = F.linear(h, w.detach()).view(-1, V)
    h.mul_(2)
    return F.cross_entropy(logits, y.view(-1)) + h.sum() * 1e-3 + 0 * w.sum()


def own_log_softmax(x, w, y):
    return F.nll_loss(F.log_softmax(F.linear(x, w).view(-1, V), -1), y.view(-1))


def two_losses(x, w, y):
    return flat(x, w, y) + flat(x.flip(1), w, y)


def weight_scaled(x, w, y):
    return F.cross_entropy(F.linear(x, w * 3.0).view(-1, V), y.view(-1))


def normed_weight(x, w, y):
    return F.cross_entropy(F.linear(x, F.normalize(w, dim=-1)).view(-1, V), y.view(-1))


def rows_reversed(x, w, y):
    return F.cross_entropy(F.linear(x, w).flip(1).view(-1, V), y.view(-1))


def batch_as_classes(x, w, y):
    """A class axis that happens to be as long as the vocabulary."""
    square = x[:, :1].expand(B, V, D).reshape(B, V, D)
    return F.cross_entropy(F.linear(square, w), y[:, :1].expand(B, V) % V)


LOSSES = {
    "mean": (flat, SAME),
    "sum": (lambda x, w, y: flat(x, w, y, reduction="sum"), SAME),
    "per token, masked": (by_mask, SAME),
    "per token, in rows": (
        lambda x, w, y: (
            F.cross_entropy(F.linear(x, w).transpose(1, 2), y, reduction="none").mean(1).sum()
        ),
        SAME,
    ),
    "ignored targets": (lambda x, w, y: flat(x, w, y, ignore_index=3), SAME),
    "shifted": (shifted, SAME),
    "in fp32": (
        lambda x, w, y: F.cross_entropy(F.linear(x, w).float().view(-1, V), y.view(-1)),
        SAME,
    ),
    "classes second": (lambda x, w, y: F.cross_entropy(F.linear(x, w).transpose(1, 2), y), SAME),
    "classes second by permute": (
        lambda x, w, y: F.cross_entropy(F.linear(x, w).permute(0, 2, 1), y),
        SAME,
    ),
    "flattened": (lambda x, w, y: F.cross_entropy(F.linear(x, w).flatten(0, 1), y.flatten()), SAME),
    "two losses": (two_losses, SAME),
    "a scaled weight": (weight_scaled, RIGHT),
    "a normed weight": (normed_weight, RIGHT),
    "module": (
        lambda x, w, y: torch.nn.CrossEntropyLoss()(F.linear(x, w).view(-1, V), y.view(-1)),
        RIGHT,
    ),
    "product": (lambda x, w, y: F.cross_entropy((x @ w.t()).view(-1, V), y.view(-1)), RIGHT),
    "smoothed": (lambda x, w, y: flat(x, w, y, label_smoothing=0.1), ALONE),
    "weighted classes": (
        lambda x, w, y: flat(x, w, y, weight=torch.linspace(0.5, 2, V).double()),
        ALONE,
    ),
    "softcap": (
        lambda x, w, y: F.cross_entropy(
            (torch.tanh(F.linear(x, w) / 30) * 30).view(-1, V), y.view(-1)
        ),
        ALONE,
    ),
    "temperature": (
        lambda x, w, y: F.cross_entropy((F.linear(x, w) / 0.7).view(-1, V), y.view(-1)),
        ALONE,
    ),
    "bias": (
        lambda x, w, y: F.cross_entropy(
            F.linear(x, w, torch.linspace(-1, 1, V).double()).view(-1, V), y.view(-1)
        ),
        ALONE,
    ),
    "z-loss": (twice, ALONE),
    "accuracy beside": (accuracy, ALONE),
    "logits returned": (lambda x, w, y: flat(x, w, y) + F.linear(x, w).sum() * 1e-3, RIGHT),
    "probabilities": (
        lambda x, w, y: F.cross_entropy(
            F.linear(x, w).view(-1, V), F.one_hot(y.view(-1), V).float().softmax(-1)
        ),
        ALONE,
    ),
    "classes cut off": (
        lambda x, w, y: F.cross_entropy(F.linear(x, w)[..., :29].reshape(-1, 29), y.view(-1) % 29),
        ALONE,
    ),
    "classes reversed": (
        lambda x, w, y: F.cross_entropy(F.linear(x, w).flip(-1).view(-1, V), y.view(-1)),
        ALONE,
    ),
    "rows reversed": (rows_reversed, ALONE),
    "changed logits": (changed_logits, ALONE),
    "changed input": (changed_input, ALONE),
    "own log-softmax": (own_log_softmax, ALONE),
    "dropout on logits": (
        lambda x, w, y: F.cross_entropy(F.dropout(F.linear(x, w), 0.0).view(-1, V), y.view(-1)),
        RIGHT,
    ),
    "logits of a masked row": (
        lambda x, w, y: F.cross_entropy(F.linear(x, w)[y != 3], y[y != 3]),
        RIGHT,
    ),
    "half a batch": (
        lambda x, w, y: F.cross_entropy(F.linear(x, w)[:2].reshape(-1, V), y[:2].reshape(-1)),
        RIGHT,
    ),
    "every other token": (
        lambda x, w, y: F.cross_entropy(
            F.linear(x, w)[:, ::2].reshape(-1, V), y[:, ::2].reshape(-1)
        ),
        RIGHT,
    ),
    "square": (batch_as_classes, RIGHT),
    "transposed by mistake": (
        lambda x, w, y: F.cross_entropy(F.linear(x, w).transpose(1, 2).reshape(-1, V), y.view(-1)),
        ALONE,
    ),
    "one target column": (lambda x, w, y: F.cross_entropy(F.linear(x[:, -1], w), y[:, -1]), SAME),
}


def attend(q, k, v, mask, **options):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)


def ones(*shape):
    return torch.ones(*shape, dtype=torch.bool)


def additive(shown, hidden=-math.inf):
    return torch.zeros(S, S, dtype=FLOAT).masked_fill(~shown, hidden)


def repeat(k, n=H // G):
    return k[:, :, None].expand(B, G, n, S, D).reshape(B, G * n, S, D)


def packed(q, k, v):
    positions = torch.cat([torch.arange(4), torch.arange(6)])
    document = (positions == 0).cumsum(0)
    mask = ones(S, S).tril() & (document[:, None] == document[None, :])
    return attend(q, k, v, mask)


def set_afterwards(q, k, v):
    mask = ones(S, S).tril()
    mask[:, :3] = True
    return attend(q, k, v, mask)


def filled_through_a_view(q, k, v):
    mask = ones(S, S).tril()
    mask[0].fill_(True)
    return attend(q, k, v, mask)


def filled_later(q, k, v):
    mask = torch.zeros(S, S, dtype=FLOAT)
    mask.masked_fill_(~ones(S, S).tril(), -math.inf)
    return attend(q, k, v, mask)


def result_changed(q, k, v):
    mask = ones(S, S).tril()
    first = attend(q, k, v, mask) * 1.0
    first /= first.detach().abs().sum(-1, keepdim=True)
    return attend(first, k, v, mask)


def changed_between(q, k, v):
    mask = ones(S, S).tril()
    first = attend(q, k, v, mask)
    mask.view(-1)[1] = True
    return first + attend(q, k, v, mask)


def random_mask(q, k, v):
    mask = ones(S, S).tril() & (torch.rand(S, S) > 1e-12)
    return attend(q, k, v, mask)


def by_data(q, k, v):
    mask = ones(S, S).tril() & (k[0, 0, :, 0] > -1e9)
    return attend(q, k, v, mask)


def interleaved(k):
    """Heads repeated in the other order: 0 1 0 1, not 0 0 1 1."""
    return k.repeat(1, H // G, 1, 1)


def pair(k):
    return k[:, :G]


MASKS = {
    "bool causal": (lambda q, k, v: attend(q, k, v, ones(S, S).tril()), SAME),
    "bool causal of a batch": (
        lambda q, k, v: attend(q, k, v, ones(S, S).tril().expand(B, 1, S, S)),
        SAME,
    ),
    "-inf causal": (lambda q, k, v: attend(q, k, v, additive(ones(S, S).tril())), SAME),
    "least float causal": (
        lambda q, k, v: attend(q, k, v, additive(ones(S, S).tril(), torch.finfo(FLOAT).min)),
        SAME,
    ),
    "by positions": (
        lambda q, k, v: attend(q, k, v, torch.arange(S)[:, None] >= torch.arange(S)[None]),
        SAME,
    ),
    "triu of -inf": (
        lambda q, k, v: attend(q, k, v, torch.triu(torch.full((S, S), -math.inf, dtype=FLOAT), 1)),
        SAME,
    ),
    "all visible": (lambda q, k, v: attend(q, k, v, ones(S, S)), SAME),
    "scaled": (lambda q, k, v: attend(q, k, v, ones(S, S).tril(), scale=0.3), SAME),
    "repeated heads": (
        lambda q, k, v: attend(q, repeat(pair(k)), repeat(pair(v)), ones(S, S).tril()),
        SAME,
    ),
    "repeat_interleave": (
        lambda q, k, v: attend(
            q,
            pair(k).repeat_interleave(2, 1),
            pair(v).repeat_interleave(2, dim=1),
            ones(S, S).tril(),
        ),
        SAME,
    ),
    "interleaved heads": (
        lambda q, k, v: attend(q, interleaved(pair(k)), interleaved(pair(v)), ones(S, S).tril()),
        RIGHT,
    ),
    "keys repeated, values not": (
        lambda q, k, v: attend(q, repeat(pair(k)), v, ones(S, S).tril()),
        RIGHT,
    ),
    "keys scaled after repeating": (
        lambda q, k, v: attend(q, repeat(pair(k)) * 2, repeat(pair(v)), ones(S, S).tril()),
        RIGHT,
    ),
    "window": (lambda q, k, v: attend(q, k, v, ones(S, S).tril() & ones(S, S).triu(-3)), ALONE),
    "window as wide as the context": (
        lambda q, k, v: attend(q, k, v, ones(S, S).tril() & ones(S, S).triu(-S)),
        SAME,
    ),
    "prefix": (lambda q, k, v: attend(q, k, v, ones(S, S).tril() | (torch.arange(S) < 3)), ALONE),
    "reversed": (lambda q, k, v: attend(q, k, v, ones(S, S).triu()), ALONE),
    "one too many": (lambda q, k, v: attend(q, k, v, ones(S, S).tril(1)), ALONE),
    "one too few": (
        lambda q, k, v: attend(q, k, v, ones(S, S).tril(-1) | (torch.arange(S) < 1)),
        ALONE,
    ),
    "one wrong entry": (
        lambda q, k, v: attend(
            q,
            k,
            v,
            ones(S, S).tril()
            | F.one_hot(torch.tensor(9), S).bool() & (torch.arange(S)[:, None] == 0),
        ),
        ALONE,
    ),
    "alibi": (
        lambda q, k, v: attend(
            q,
            k,
            v,
            additive(ones(S, S).tril()) - 0.1 * (torch.arange(S)[:, None] - torch.arange(S)).abs(),
        ),
        ALONE,
    ),
    "weak hiding": (lambda q, k, v: attend(q, k, v, additive(ones(S, S).tril(), -10.0)), ALONE),
    "hidden by -1e4": (lambda q, k, v: attend(q, k, v, additive(ones(S, S).tril(), -1e4)), ALONE),
    "ones are added": (lambda q, k, v: attend(q, k, v, ones(S, S).tril().float()), ALONE),
    "packed": (packed, ALONE),
    "one head sees all": (
        lambda q, k, v: attend(
            q,
            k,
            v,
            ones(S, S).tril().expand(1, H, S, S) | (torch.arange(H) == 1)[None, :, None, None],
        ),
        ALONE,
    ),
    "one sequence sees all": (
        lambda q, k, v: attend(
            q,
            k,
            v,
            ones(S, S).tril().expand(B, 1, S, S) | (torch.arange(B) == 2)[:, None, None, None],
        ),
        ALONE,
    ),
    "set afterwards": (set_afterwards, ALONE),
    "filled through a view": (filled_through_a_view, ALONE),
    "filled in place": (filled_later, RIGHT),
    "its result changed in place": (result_changed, SAME),
    "changed between two uses": (changed_between, ALONE),
    "random": (random_mask, ALONE),
    "by data": (by_data, ALONE),
    "queries fewer than keys": (
        lambda q, k, v: attend(q[:, :, -4:], k, v, ones(S, S).tril()[-4:]),
        ALONE,
    ),
    "queries fewer, first keys": (
        lambda q, k, v: attend(q[:, :, :4], k, v, ones(4, S).tril()),
        RIGHT,
    ),
    "mask and is_causal nowhere": (lambda q, k, v: attend(q, k, v, None), ALONE),
}


# Norms of x (B, T, D) by w (D), with r (B, T, D) as what may be added.


def root(x, eps=1e-5):
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rms(x, w, eps=1e-5):
    return w * (x * root(x, eps))


def added_norm(x, w, r):
    stream = x + r
    return stream + rms(stream, w)


def added_layer_norm(x, w, r):
    stream = x + r
    return stream + F.layer_norm(stream, (D,), w, w.flip(0), 1e-5)


def stream_used_before_weight(x, w, r):
    """What is added to is used before the weight of the norm is known."""
    stream = x + r
    scale = 1 + w * stream.mean()
    return stream * rms(stream, scale)


def root_used_twice(x, w, r):
    scale = root(x)
    return w * (x * scale) + r * scale


def unit_used_twice(x, w, r):
    unit = x * root(x)
    return w * unit + unit.sin()


def changed_between(x, w, r):
    other = r * 1.0
    scale = root(x)
    other.mul_(1.5)
    return w * (x * scale) + other


NORMS = {
    "rms": (lambda x, w, r: rms(x, w), SAME),
    "rms after an addition": (added_norm, SAME),
    "rms of a sum used once": (lambda x, w, r: rms(x + r, w), SAME),
    "rms by square": (
        lambda x, w, r: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w,
        SAME,
    ),
    "rms by product": (
        lambda x, w, r: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w,
        SAME,
    ),
    "one plus weight": (lambda x, w, r: rms(x, 1 + w), SAME),
    "torch's rms": (lambda x, w, r: F.rms_norm(x, (D,), w, 1e-5), SAME),
    "torch's rms with its own eps": (lambda x, w, r: F.rms_norm(x, (D,), w), SAME),
    "torch's layer norm": (lambda x, w, r: F.layer_norm(x, (D,), w, w.flip(0)), SAME),
    "layer norm without bias": (lambda x, w, r: F.layer_norm(x, (D,), w), SAME),
    "layer norm after an addition": (added_layer_norm, SAME),
    "broadcast addition": (lambda x, w, r: F.layer_norm(x + r[:1], (D,), w, w.flip(0)), SAME),
    "two norms of one stream": (lambda x, w, r: rms(x, w) * rms(x, w + 1), SAME),
    "a norm of a norm": (lambda x, w, r: rms(rms(x, w), w), SAME),
    "no weight": (lambda x, w, r: x * root(x) + 0 * w, ALONE),
    "torch's without weight": (lambda x, w, r: F.layer_norm(x, (D,)) + 0 * w, ALONE),
    "eps outside the root": (
        lambda x, w, r: w * (x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-2)),
        ALONE,
    ),
    "eps after the root": (
        lambda x, w, r: w * (x * (torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) + 0.1)),
        ALONE,
    ),
    "a sum of squares": (
        lambda x, w, r: w * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-5)),
        ALONE,
    ),
    "a mean of cubes": (
        lambda x, w, r: w * (x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + 1e-5)),
        ALONE,
    ),
    "over tokens": (
        lambda x, w, r: w * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5)),
        ALONE,
    ),
    "over two axes": (
        lambda x, w, r: w * (x * torch.rsqrt(x.pow(2).mean((1, 2), keepdim=True) + 1e-5)),
        ALONE,
    ),
    "layer norm over two axes": (
        lambda x, w, r: F.layer_norm(x, (T, D), w.expand(T, D)) + r,
        ALONE,
    ),
    "gated before the weight": (lambda x, w, r: w * (x * root(x) * r.sigmoid()), ALONE),
    "gated by rows": (lambda x, w, r: (x * root(x)) * r, ALONE),
    "gated after the weight": (lambda x, w, r: rms(x, w) * F.silu(r), RIGHT),
    "scaled by another's root": (lambda x, w, r: w * (r * root(x)), ALONE),
    "root used twice": (root_used_twice, ALONE),
    "unit used twice": (unit_used_twice, ALONE),
    "clamped": (lambda x, w, r: w * (x * root(x)).clamp(-1, 1), ALONE),
    "partial": (
        lambda x, w, r: w * (x * torch.rsqrt(x[..., :6].pow(2).mean(-1, keepdim=True) + 1e-5)),
        ALONE,
    ),
    "alpha": (lambda x, w, r: rms(torch.add(x, r, alpha=2), w), RIGHT),
    "added to itself": (lambda x, w, r: rms(x + x, w), RIGHT),
    "a weight of every sequence": (lambda x, w, r: r[:, :1] * (x * root(x)), ALONE),
    "stream used before the weight": (stream_used_before_weight, RIGHT),
    "changed in between": (changed_between, ALONE),
    "a learned eps": (
        lambda x, w, r: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + w.abs().sum())),
        ALONE,
    ),
    "a large eps": (lambda x, w, r: rms(x, w, 0.5), SAME),
    "a whole number as eps": (lambda x, w, r: rms(x, w, 1), RIGHT),
}


# Feed-forward networks of x (B, T, D), w_in (F, D), w_out (D, F) and r, as wide as they are inside.


def network(x, w, v, r, act=F.gelu):
    return F.linear(act(F.linear(x, w)), v)


def changed_inside(x, w, v, r):
    h = F.gelu(F.linear(x, w))
    h.mul_(2)
    return F.linear(h, v)


def changed_rows(x, w, v, r):
    rows = x * 1.0
    z = F.linear(rows, w.detach())
    rows.mul_(2)
    return F.linear(F.gelu(z), v) + 0 * w.sum() + rows


def wide_rows_twice(x, w, v, r):
    z = F.linear(x, w)
    return F.linear(F.gelu(z), v) + z.mean()


def activation_twice(x, w, v, r):
    h = F.gelu(F.linear(x, w))
    return F.linear(h, v) + h.square().mean()


def as_weight(x, w, v, r):
    return F.linear(v, F.gelu(F.linear(x[0], w)))


FEED_FORWARDS = {
    "gelu": (network, SAME),
    "rows of one matrix": (lambda x, w, v, r: network(x[0], w, v, r), SAME),
    "the module": (lambda x, w, v, r: network(x, w, v, r, torch.nn.GELU()), SAME),
    "four axes": (lambda x, w, v, r: network(x[None], w, v, r)[0], SAME),
    "two in a row": (lambda x, w, v, r: network(network(x, w, v, r), w, v, r), SAME),
    "and the stream": (lambda x, w, v, r: x + network(x, w, v, r), SAME),
    "tanh": (
        lambda x, w, v, r: network(x, w, v, r, lambda z: F.gelu(z, approximate="tanh")),
        ALONE,
    ),
    "silu": (lambda x, w, v, r: network(x, w, v, r, F.silu), ALONE),
    "written out": (
        lambda x, w, v, r: network(x, w, v, r, lambda z: z * (1 + torch.erf(z * 2**-0.5)) / 2),
        ALONE,
    ),
    "a bias first": (lambda x, w, v, r: F.linear(F.gelu(F.linear(x, w, r)), v), ALONE),
    "a bias last": (lambda x, w, v, r: F.linear(F.gelu(F.linear(x, w)), v, r[:D]), ALONE),
    "gated": (lambda x, w, v, r: F.linear(F.gelu(F.linear(x, w)) * F.linear(x, w), v), ALONE),
    "scaled before": (lambda x, w, v, r: F.linear(F.gelu(F.linear(x, w) * r), v), ALONE),
    "scaled after": (lambda x, w, v, r: F.linear(F.gelu(F.linear(x, w)) * r, v), ALONE),
    "dropout inside": (
        lambda x, w, v, r: F.linear(F.dropout(F.gelu(F.linear(x, w)), 0.0), v),
        ALONE,
    ),
    "another width": (lambda x, w, v, r: F.linear(F.gelu(F.linear(x, w)), v[:5]), ALONE),
    "no matrix first": (lambda x, w, v, r: F.linear(F.gelu(x), w), ALONE),
    "no matrix last": (lambda x, w, v, r: F.gelu(F.linear(x, w)).sum(-1), ALONE),
    "changed inside": (changed_inside, ALONE),
    "changed rows": (changed_rows, ALONE),
    "wide rows twice": (wide_rows_twice, ALONE),
    "activation twice": (activation_twice, ALONE),
    "as a weight": (as_weight, ALONE),
}


# Rotations of q and k (B, H, S, D) by frequencies (D / 2): tables of sines and cosines.


def turned(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def angles_of(frequencies):
    positions = torch.arange(S, dtype=frequencies.dtype)
    return torch.cat([torch.outer(positions, frequencies)] * 2, -1)


def rotated(q, k, frequencies, change=lambda table: table):
    angles = angles_of(frequencies)
    cos, sin = change(angles.cos()), change(angles.sin())
    return (turned(q, cos, sin) * turned(k, cos, sin)).sum(-1)


def wave(q, k, frequencies):
    return (q.sin() * k).sum(-1) + q.sin().mean() * frequencies.sum()


def rotated_once(q, k, frequencies):
    angles = angles_of(frequencies.detach())
    return (q * angles.cos()).sum(-1) + 0 * k.sum() + 0 * frequencies.sum()


def fixed(function):
    return lambda q, k, f: function(q, k, f.detach()) + 0 * f.sum()


ROTATIONS = {
    "fixed frequencies": (fixed(rotated), SAME),
    "scaled and cast": (
        fixed(lambda q, k, f: rotated(q, k, f, lambda t: (t * 1.5).to(q.dtype))),
        SAME,
    ),
    "learned frequencies": (rotated, ALONE),
    "of the stream": (wave, ALONE),
    "used once": (rotated_once, ALONE),
}


# Attention of q, k and v that lie in one x (B, S, 3 H D), and of what else there may be: y, alike.
C = H * D


def in_heads(part, heads=H):
    return part.reshape(B, S, heads, D).transpose(1, 2)


def parts_of(x):
    """As nanoGPT has it."""
    return [in_heads(part) for part in x.split(C, dim=2)]


def self_attention(x, y, change=lambda q, k, v: (q, k, v), **options):
    return attend(*change(*parts_of(x)), None, **{"is_causal": True, **options})


def merged(x, y):
    """With what follows in most models."""
    out = self_attention(x, y).transpose(1, 2).contiguous().view(B, S, C)
    return out * y[..., :C]


def by_functions(x, y):
    q, k, v = (torch.reshape(p, (B, S, H, D)) for p in torch.chunk(x, 3, -1))
    return attend(*(torch.transpose(p, 1, 2) for p in (q, k, v)), None, is_causal=True)


def three_first(x, y):
    qkv = x.reshape(B, S, 3, H, D).permute(2, 0, 3, 1, 4)
    return attend(qkv[0], qkv[1], qkv[2], None)


def by_head(x, y):
    """Interleaved by head, as GPT-NeoX has it."""
    q, k, v = x.view(B, S, H, 3 * D).transpose(1, 2).chunk(3, dim=-1)
    return attend(q, k, v, None, is_causal=True)


def by_width(x, y):
    """The three of each number lie side by side: rows are not dense."""
    q, k, v = x.view(B, S, H, D, 3).transpose(1, 2).unbind(-1)
    return attend(q, k, v, None, is_causal=True)


def keys_with_values(x, y):
    q, kv = x.split([C, 2 * C], -1)
    k, v = kv.chunk(2, dim=-1)
    return attend(in_heads(q), in_heads(k), in_heads(v), None, is_causal=True)


def sliced(x, y):
    return attend(
        in_heads(x[..., :C]), in_heads(x[:, :, C : 2 * C]), in_heads(x[..., 2 * C :]), None
    )


def grouped(x, y, **options):
    few = x[..., : (H + 2 * G) * D] * 1.0
    q, k, v = few.split([C, G * D, G * D], -1)
    heads = in_heads(q), in_heads(k, G), in_heads(v, G)
    return attend(*heads, None, **{"enable_gqa": True, "is_causal": True, **options})


def expanded(x, y):
    few = x[..., : (H + 2) * D] * 1.0
    q, k, v = few.split([C, D, D], -1)
    k, v = (in_heads(p, 1).expand(B, H, S, D) for p in (k, v))
    return attend(in_heads(q), k, v, None)


def rows(x, y):
    """A product of rows without sequences, as GPT-2 of transformers has it."""
    flat = x.view(-1, 3 * C) * 1.0
    parts = flat.view(B, S, 3 * C).split(C, dim=2)
    return attend(*(p.view(B, S, -1, D).transpose(1, 2) for p in parts), None, is_causal=True)


def time_first(x, y):
    turned = x.transpose(0, 1) * 1.0
    q, k, v = turned.contiguous().view(S, B, H, 3 * D).split(D, -1)
    return attend(*(p.permute(1, 2, 0, 3) for p in (q, k, v)), None, is_causal=True)


def one_part_more(x, y):
    q, k, v, gate = torch.cat([x, y[..., :C]], -1).split(C, -1)
    return attend(in_heads(q), in_heads(k), in_heads(v), None) * in_heads(gate).sigmoid()


def one_part_unused(x, y):
    q, k, v, _ = torch.cat([x, y[..., :C]], -1).split(C, -1)
    return attend(in_heads(q), in_heads(k), in_heads(v), None)


def two_of_one_split(x, y):
    q, k, v = parts_of(x)
    return attend(q, k, v, None, is_causal=True) + attend(k, q, v, None)


def split_twice(x, y):
    return self_attention(x, y) + self_attention(x, y, is_causal=False)


def two_layers(x, y):
    first = self_attention(x, y).transpose(1, 2).flatten(2)
    return self_attention(torch.cat([first, y[..., C:]], -1), y)


def query_used_twice(x, y):
    q, k, v = parts_of(x)
    return attend(q, k, v, None, is_causal=True) + q.sin()


def source_used_twice(x, y):
    z = x * 1.0
    return self_attention(z, y) + in_heads(z[..., :C]).tanh()


def changed_in_between(x, y):
    z = x * 1.0
    q, k, v = (in_heads(z[..., i * C : (i + 1) * C]) for i in range(3))  # not of one split, where
    z.mul_(1.5)  # torch refuses it
    return attend(q, k, v, None, is_causal=True)


def keys_changed(x, y):
    z = x * 1.0
    q, k, v = (in_heads(z[..., i * C : (i + 1) * C]) for i in range(3))
    k.mul_(1.5)
    return attend(q, k, v, None, is_causal=True)


def changed_before(x, y):
    z = x * 1.0
    z.mul_(1.5)
    return self_attention(z, y)


def without_gradient(x, y):
    with torch.no_grad():
        out = self_attention(x, y)
    return out * y[:, None, :, :D] + 0 * x.sum()


def keys_without_gradient(x, y):
    q, k, v = parts_of(x)
    with torch.no_grad():
        k = k.view_as(k)
    return attend(q, k, v, None, is_causal=True)


def keys_in_heads_without_gradient(x, y):
    q, k, v = x.split(C, 2)
    with torch.no_grad():
        k = in_heads(k)
    return attend(in_heads(q), k, in_heads(v), None, is_causal=True)


def split_without_gradient(x, y):
    with torch.no_grad():
        q, k, v = parts_of(x)
    return attend(q + y[:, None, :, :D], k, v, None) + 0 * x.sum()


def cross(x, y):
    return attend(parts_of(x)[0], *parts_of(y)[1:], None)


def keys_from_elsewhere(x, y):
    q, _, v = parts_of(x)
    return attend(q, parts_of(y)[1], v, None, is_causal=True)


def half_the_tokens(x, y):
    return attend(*(p[:, :, : S // 2] for p in parts_of(x)), None, is_causal=True)


def overlapping(x, y):
    """As many elements as there are, some of them twice."""
    starts = (0, C // 2, 2 * C)
    return attend(*(in_heads(x[..., start : start + C]) for start in starts), None, is_causal=True)


def without_heads(x, y):
    return attend(*x.split(C, 2), None, is_causal=True)


def heads_as_batch(x, y):
    q, k, v = (p.flatten(0, 1) for p in parts_of(x))
    return attend(q, k, v, None, is_causal=True)


def mapped(x, y):
    def one(x_SC):
        return attend(*(p.view(S, H, D).transpose(0, 1) for p in x_SC.split(C, 1)), None)

    return torch.vmap(one)(x)


PACKED = {
    "as nanoGPT": (self_attention, SAME),
    "with what follows": (merged, SAME),
    "not causal": (lambda x, y: self_attention(x, y, is_causal=False), SAME),
    "by functions": (by_functions, SAME),
    "unbind": (lambda x, y: attend(*x.view(B, S, 3, H, D).transpose(1, 3).unbind(2), None), SAME),
    "three first": (three_first, SAME),
    "select": (
        lambda x, y: attend(
            *(x.view(B, S, 3, H, D).select(2, i).transpose(1, 2) for i in range(3)), None
        ),
        SAME,
    ),
    "interleaved by head": (by_head, SAME),
    "interleaved by number": (by_width, SAME),
    "unflatten": (
        lambda x, y: attend(*x.unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4), None),
        SAME,
    ),
    "keys with values": (keys_with_values, SAME),
    "slices": (sliced, SAME),
    "another order": (lambda x, y: self_attention(x, y, lambda v, q, k: (q, k, v)), SAME),
    "q and k swapped": (lambda x, y: self_attention(x, y, lambda q, k, v: (k, q, v)), SAME),
    "the scale that is the default": (lambda x, y: self_attention(x, y, scale=D**-0.5), SAME),
    "grouped heads": (grouped, SAME),
    "grouped heads, not causal": (lambda x, y: grouped(x, y, is_causal=False), SAME),
    "rows of all sequences": (rows, SAME),
    "time before batch": (time_first, SAME),
    "heads before time": (
        lambda x, y: attend(*(x.view(B, 3, H, S, D) * 1.0).unbind(1), None),
        SAME,
    ),
    "stacked": (lambda x, y: attend(*(x.view(3, B, H, S, D) * 1.0).unbind(0), None), SAME),
    "tokens that become heads": (
        lambda x, y: attend(*x.view(B, 3, H, S, D).unbind(1), None),
        RIGHT,
    ),
    "two layers": (two_layers, SAME),
    "the source of a sum": (lambda x, y: self_attention(x + y, y), SAME),
    "one head expanded": (expanded, ALONE),
    "dropout": (lambda x, y: self_attention(x, y, dropout_p=1e-9), ALONE),
    "a mask": (lambda x, y: attend(*parts_of(x), ones(S, S).tril()), ALONE),
    "a scale of its own": (lambda x, y: self_attention(x, y, scale=0.3), ALONE),
    "a scale of one": (lambda x, y: self_attention(x, y, scale=1.0), ALONE),
    "rotated": (
        lambda x, y: self_attention(
            x, y, lambda q, k, v: (turned(q, y[0, 0, :D].cos(), y[0, 0, :D].sin()), k, v)
        ),
        ALONE,
    ),
    "normed": (
        lambda x, y: self_attention(
            x, y, lambda q, k, v: (F.rms_norm(q, (D,)), F.rms_norm(k, (D,)), v)
        ),
        ALONE,
    ),
    "queries scaled": (lambda x, y: self_attention(x, y, lambda q, k, v: (2 * q, k, v)), ALONE),
    "keys reversed": (lambda x, y: self_attention(x, y, lambda q, k, v: (q, k.flip(2), v)), ALONE),
    "keys detached": (lambda x, y: self_attention(x, y, lambda q, k, v: (q, k.detach(), v)), ALONE),
    "queries copied": (
        lambda x, y: self_attention(x, y, lambda q, k, v: (q.contiguous(), k, v)),
        ALONE,
    ),
    "queries cast": (
        lambda x, y: self_attention(x, y, lambda q, k, v: (q.to(torch.float32).to(q.dtype), k, v)),
        ALONE,
    ),
    "queries as keys": (lambda x, y: self_attention(x, y, lambda q, k, v: (q, q, v)), ALONE),
    "queries as everything": (lambda x, y: self_attention(x, y, lambda q, k, v: (q, q, q)), ALONE),
    "query used twice": (query_used_twice, ALONE),
    "source used twice": (source_used_twice, ALONE),
    "cross attention": (cross, ALONE),
    "keys from elsewhere": (keys_from_elsewhere, ALONE),
    "one part more": (one_part_more, ALONE),
    "one part unused": (one_part_unused, ALONE),
    "two of one split": (two_of_one_split, ALONE),
    "split twice": (split_twice, ALONE),
    "overlapping": (overlapping, ALONE),
    "changed in between": (changed_in_between, ALONE),
    "keys changed": (keys_changed, ALONE),
    "changed before": (changed_before, RIGHT),
    "without gradient": (without_gradient, ALONE),
    "keys without gradient": (keys_without_gradient, ALONE),
    "keys in heads without gradient": (keys_in_heads_without_gradient, ALONE),
    "split without gradient": (split_without_gradient, ALONE),
    "fewer queries": (
        lambda x, y: self_attention(x, y, lambda q, k, v: (q[:, :, -4:], k, v), is_causal=False),
        ALONE,
    ),
    "fewer keys": (
        lambda x, y: self_attention(
            x, y, lambda q, k, v: (q, k[:, :, :4], v[:, :, :4]), is_causal=False
        ),
        ALONE,
    ),
    "half the tokens": (half_the_tokens, ALONE),
    "every other token": (
        lambda x, y: self_attention(x, y, lambda *qkv: [p[:, :, ::2] for p in qkv]),
        ALONE,
    ),
    "some heads": (
        lambda x, y: self_attention(x, y, lambda *qkv: [p[:, :2] for p in qkv]),
        ALONE,
    ),
    "a part of the width": (
        lambda x, y: self_attention(x, y, lambda *qkv: [p[..., :8] for p in qkv]),
        ALONE,
    ),
    "heads chosen by numbers": (
        lambda x, y: self_attention(
            x, y, lambda *qkv: [p[:, torch.tensor([0, 1, 2, 3])] for p in qkv]
        ),
        ALONE,
    ),
    "without heads": (without_heads, ALONE),
    "heads as batch": (heads_as_batch, ALONE),
    "mapped": (mapped, ALONE),
}
