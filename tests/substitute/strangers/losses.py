"""Heads and losses: cross entropy in unusual spellings, and what only looks like it."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.substitute.strangers.case import (
    THREE_STEPS,
    TIME,
    VOCAB,
    WIDTH,
    Batch,
    Case,
    Loss,
    Shapes,
)

CASES: list[Case] = []


class Words(nn.Module):
    """Embedding, one hidden layer, a linear head."""

    def __init__(self, bias: bool = False, frozen_head: bool = False, rows: int = VOCAB) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, rows, bias=bias)
        self.temperature = nn.Parameter(torch.zeros(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.head.weight.requires_grad_(not frozen_head)

    def hidden(self, words_BT: Tensor) -> Tensor:
        return torch.tanh(self.mix(self.embed(words_BT)))

    def forward(self, words_BT: Tensor) -> Tensor:
        return self.head(self.hidden(words_BT))


def case(
    replaced: bool = False,
    model: Callable[[], nn.Module] = Words,
    shapes: Shapes = THREE_STEPS,
    exact: float = 1e-9,
) -> Callable[[Loss], Loss]:
    def add(loss: Loss) -> Loss:
        CASES.append(Case(loss.__name__, model, loss, replaced, shapes, exact))
        return loss

    return add


def flat(logits_BTV: Tensor, y_BT: Tensor, **how) -> Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1), y_BT.flatten(), **how)


@case(replaced=True)
def plain_rows(model: nn.Module, batch: Batch) -> Tensor:
    return flat(model(batch[0]), batch[1])


@case()
def label_smoothing(model: nn.Module, batch: Batch) -> Tensor:
    return flat(model(batch[0]), batch[1], label_smoothing=0.1)


@case()
def softcap(model: nn.Module, batch: Batch) -> Tensor:
    return flat(2 * torch.tanh(model(batch[0]) / 2), batch[1])


@case()
def z_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch[0])
    return flat(logits, batch[1]) + 0.1 * logits.logsumexp(-1).square().mean()


@case()
def class_weights(model: nn.Module, batch: Batch) -> Tensor:
    weights = torch.linspace(0.5, 2, VOCAB).to(model.mix.weight.dtype)
    return flat(model(batch[0]), batch[1], weight=weights)


@case(replaced=True)
def other_ignore_index(model: nn.Module, batch: Batch) -> Tensor:
    return flat(model(batch[0]), batch[1] % 4, ignore_index=3)


@case(replaced=True)
def some_ignored(model: nn.Module, batch: Batch) -> Tensor:
    return flat(model(batch[0]), batch[1].masked_fill(batch[1] < 8, -100))


@case(replaced=True)
def all_ignored(model: nn.Module, batch: Batch) -> Tensor:
    return flat(model(batch[0]), torch.full_like(batch[1], -100), reduction="sum")


@case(replaced=True)
def ignore_index_within_classes_and_default(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return flat(model(x), y, ignore_index=0) + flat(model(x.flip(1)), y.flip(1))


@case(model=lambda: Words(bias=True))
def bias_in_the_head(model: nn.Module, batch: Batch) -> Tensor:
    return flat(model(batch[0]), batch[1])


@case()
def probabilities_as_targets(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch[0])
    soft = 0.9 * F.one_hot(batch[1], VOCAB).to(logits.dtype) + 0.1 / VOCAB
    return F.cross_entropy(logits.flatten(0, 1), soft.flatten(0, 1))


@case()
def logits_also_scored(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch[0])
    hit = (logits.argmax(-1) == batch[1]).to(logits.dtype).mean()
    return flat(logits, batch[1]) * (1 + hit.detach())


@case()
def two_shifts_of_the_same_logits(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    logits = model(x)
    return flat(logits[:, :-1], y[:, 1:]) + flat(logits[:, :-2], y[:, 2:])


@case(replaced=True)
def sum_over_count(model: nn.Module, batch: Batch) -> Tensor:
    return flat(model(batch[0]), batch[1], reduction="sum") / batch[1].numel()


@case(replaced=True)
def own_weights_of_tokens(model: nn.Module, batch: Batch) -> Tensor:
    per_token = flat(model(batch[0]), batch[1], reduction="none")
    return (per_token * (batch[1].flatten() + 1)).mean() / VOCAB


@case(replaced=True)
def worst_sequence_only(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return flat(model(x), y, reduction="none").view(y.shape).mean(1).max()


@case(replaced=True)
def focal(model: nn.Module, batch: Batch) -> Tensor:
    per_token = flat(model(batch[0]), batch[1], reduction="none")
    return ((1 - torch.exp(-per_token)) ** 2 * per_token).mean()


@case(replaced=True)
def shifted_inside(model: nn.Module, batch: Batch) -> Tensor:
    return flat(model(batch[0])[:, :-1], batch[0][:, 1:])


@case(replaced=True)
def shifted_by_a_rolled_target(model: nn.Module, batch: Batch) -> Tensor:
    y = batch[0].roll(-1, 1)
    y[:, -1] = -100
    return flat(model(batch[0]), y)


@case(replaced=True)
def every_other_row(model: nn.Module, batch: Batch) -> Tensor:
    return flat(model(batch[0])[:, ::2], batch[1][:, ::2])


@case(replaced=True)
def classes_second(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1])


@case(replaced=True)
def classes_second_of_a_square(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    logits_BHWV = model(x).view(len(x), 2, -1, VOCAB)
    return F.cross_entropy(logits_BHWV.permute(0, 3, 1, 2), y.view(len(x), 2, -1))


@case(model=lambda: Words(rows=TIME))
def time_taken_for_classes(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1] % TIME)


@case()
def log_softmax_and_nll(model: nn.Module, batch: Batch) -> Tensor:
    return F.nll_loss(F.log_softmax(model(batch[0]), -1).flatten(0, 1), batch[1].flatten())


@case()
def gathered_log_softmax(model: nn.Module, batch: Batch) -> Tensor:
    return -model(batch[0]).log_softmax(-1).gather(-1, batch[1].unsqueeze(-1)).mean()


@case(replaced=True)
def tied_head(model: nn.Module, batch: Batch) -> Tensor:
    return flat(F.linear(model.hidden(batch[0]), model.embed.weight), batch[1])


@case()
def tied_head_by_matmul(model: nn.Module, batch: Batch) -> Tensor:
    return flat(model.hidden(batch[0]) @ model.embed.weight.T, batch[1])


@case()
def scaled_logits(model: nn.Module, batch: Batch) -> Tensor:
    return flat(model(batch[0]) * 0.5, batch[1])


@case()
def learned_temperature(model: nn.Module, batch: Batch) -> Tensor:
    return flat(model(batch[0]) * model.temperature.exp(), batch[1])


@case(replaced=True)
def normalized_head_weight(model: nn.Module, batch: Batch) -> Tensor:
    weight = F.normalize(model.head.weight, dim=-1) * 4
    return flat(F.linear(model.hidden(batch[0]), weight), batch[1])


@case(replaced=True)
def two_exits_through_one_head(model: nn.Module, batch: Batch) -> Tensor:
    first = model.hidden(batch[0])
    return flat(model.head(first), batch[1]) + flat(model.head(model.mix(first)), batch[1])


@case(replaced=True)
def probe_on_a_detached_hidden(model: nn.Module, batch: Batch) -> Tensor:
    hidden = model.hidden(batch[0])
    return flat(model.head(hidden.detach()), batch[1]) + hidden.square().mean()


@case(replaced=True)
def detached_head_weight(model: nn.Module, batch: Batch) -> Tensor:
    return flat(F.linear(model.hidden(batch[0]), model.head.weight.detach()), batch[1])


@case(replaced=True)
def body_without_gradient(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        hidden = model.hidden(batch[0])
    return flat(model.head(hidden), batch[1])


@case(replaced=True)
def logits_without_gradient(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        baseline = flat(model(batch[0]), batch[1])
    return model.hidden(batch[0]).square().mean() * baseline


@case(replaced=True)
def last_token_only(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0])[:, -1], batch[1][:, -1])


@case(model=lambda: Words(rows=VOCAB + 8))
def padded_vocabulary_cut_off(model: nn.Module, batch: Batch) -> Tensor:
    return flat(model(batch[0])[..., :VOCAB], batch[1])


@case()
def forbidden_class_in_place(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch[0])
    logits[..., 0] = -30
    return flat(logits, batch[1])


@case()
def logits_scaled_in_place(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch[0])
    logits.mul_(0.5)
    return flat(logits, batch[1])


@case(model=lambda: Words(frozen_head=True))
def hidden_changed_after_the_head(model: nn.Module, batch: Batch) -> Tensor:
    hidden = model.mix(model.embed(batch[0]))
    logits = model.head(hidden)
    hidden.mul_(0.25)
    return flat(logits, batch[1]) + hidden.square().mean()


@case()
def head_changed_between_logits_and_loss(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        hidden = model.hidden(batch[0])
    logits = model.head(hidden)
    with torch.no_grad():
        model.head.weight.mul_(1.5)
    return flat(logits, batch[1])


@case()
def target_changed_before_the_loss(model: nn.Module, batch: Batch) -> Tensor:
    y = batch[1].clone()
    logits = model(batch[0])
    y.add_(1).remainder_(VOCAB)
    return flat(logits, y)


@case()
def gradient_hook_on_logits(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch[0])
    logits.register_hook(lambda gradient: 3 * gradient)
    return flat(logits, batch[1])


class Halved(torch.autograd.Function):
    """The identity, whose gradient is half of what comes."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient / 2


@case()
def own_gradient_of_logits(model: nn.Module, batch: Batch) -> Tensor:
    return flat(Halved.apply(model(batch[0])), batch[1])


@case()
def targets_from_the_logits(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch[0])
    return flat(logits, logits.detach().argmax(-1)) + flat(logits, batch[1])


@case(replaced=True)
def counted_calls(model: nn.Module, batch: Batch) -> Tensor:
    model.calls += 1
    return flat(model(batch[0]), batch[1])


@case(replaced=True, shapes=((1, 1), (1, 1), (1, 1)))
def one_token(model: nn.Module, batch: Batch) -> Tensor:
    return flat(model(batch[0]), batch[1])


@case(replaced=True, shapes=((2, 6), (3, 5), (2, 9), (1, 4)))
def lengths_that_change(model: nn.Module, batch: Batch) -> Tensor:
    return flat(model(batch[0]), batch[1])


@case(exact=1e-2)
def autocast_around_the_head(model: nn.Module, batch: Batch) -> Tensor:
    hidden = model.hidden(batch[0])
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.head(hidden)
    return flat(logits.float(), batch[1])


@case(replaced=True)
def head_in_double(model: nn.Module, batch: Batch) -> Tensor:
    return flat(F.linear(model.hidden(batch[0]).double(), model.head.weight.double()), batch[1])


@case(replaced=True)
def two_halves_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return flat(model(x[:1]), y[:1]) + 2 * flat(model(x[1:]), y[1:])


@case()
def logits_joined_from_two_heads(model: nn.Module, batch: Batch) -> Tensor:
    hidden = model.hidden(batch[0])
    logits = torch.cat([model.head(hidden), model.head(-hidden)], -1)
    return flat(logits, batch[1])


@case()
def square_head_of_the_wrong_side(model: nn.Module, batch: Batch) -> Tensor:
    return flat(model.hidden(batch[0]) @ model.mix.weight, batch[1] % WIDTH)


@case(replaced=True)
def loss_below_another_loss(model: nn.Module, batch: Batch) -> Tensor:
    return flat(model(batch[0]), batch[1]).clamp(min=0.1).log().square()


@case()
def head_without_gradient(model: nn.Module, batch: Batch) -> Tensor:
    hidden = model.hidden(batch[0])
    with torch.no_grad():
        logits = model.head(hidden)
    return flat(logits, batch[1]) * hidden.square().mean()


@case(replaced=True, exact=1e-2)
def full_precision_head_under_bf16(model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.hidden(batch[0])
        with torch.autocast("cpu", enabled=False):
            return flat(model.head(hidden.to(model.head.weight.dtype)), batch[1])


@case()
def recomputed_head(model: nn.Module, batch: Batch) -> Tensor:
    def rest(hidden_BTD: Tensor) -> Tensor:
        return flat(model.head(hidden_BTD), batch[1])

    return checkpoint(rest, model.hidden(batch[0]), use_reentrant=False)


@case()
def losses_of_a_mapped_function(model: nn.Module, batch: Batch) -> Tensor:
    def one(hidden_TD: Tensor, y_T: Tensor) -> Tensor:
        return F.cross_entropy(model.head(hidden_TD), y_T)

    return torch.vmap(one)(model.hidden(batch[0]), batch[1]).mean()


@case(replaced=True)
def gradient_penalty(model: nn.Module, batch: Batch) -> Tensor:
    def rest(hidden_BTD: Tensor) -> Tensor:
        return flat(model.head(hidden_BTD), batch[1])

    hidden = model.hidden(batch[0])
    return rest(hidden) + 10 * torch.func.grad(rest)(hidden).square().sum()
