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
    return torch.zeros(S, S).masked_fill(~shown, hidden)


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
    mask = torch.zeros(S, S)
    mask.masked_fill_(~ones(S, S).tril(), -math.inf)
    return attend(q, k, v, mask)


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
        lambda q, k, v: attend(
            q, k, v, additive(ones(S, S).tril(), torch.finfo(torch.float32).min)
        ),
        SAME,
    ),
    "by positions": (
        lambda q, k, v: attend(q, k, v, torch.arange(S)[:, None] >= torch.arange(S)[None]),
        SAME,
    ),
    "triu of -inf": (
        lambda q, k, v: attend(q, k, v, torch.triu(torch.full((S, S), -math.inf), 1)),
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
