"""What the operators of a step are for, on small loops whose answer is known."""

import copy
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import cycle, repeat

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from steplab.core import Dataflow
from steplab.core.dataflow import (
    BACKWARD_AGAIN,
    CAST_AGAIN,
    CAUSAL_MASK,
    CONSTANT,
    COPIED_OVER,
    COPIED_ROWS,
    IDLE_GRADIENT,
    IDLE_WEIGHT,
    MADE_BEFORE,
    MASKED,
    NEEDED,
    NOT_TAKEN,
    PARTLY_USED,
    PENALTY,
    POOLED,
    READ_ONLY,
    ROWS_COPIED,
    ROWS_OF_ZEROS,
    RUNNING,
    TIMES_ZERO,
    UNCHANGED,
    UNMOVED,
    UNREAD_OUTPUT,
    UNUSED,
    ZEROS,
    FrozenCasts,
    IdleGradients,
)
from steplab.probes import untrained
from steplab.probes.dataflow import record_dataflow
from steplab.probes.switches import switches_on


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


class Fed:
    """A step without batches, as a probe sees it."""

    def __init__(self, step: Callable[[], object]) -> None:
        self.run = step
        self.feed: Iterator[object] = repeat(None)

    def step(self, batches: object) -> object:
        return self.run()


def watched(step: Callable[[], object]) -> tuple[Dataflow, set[str]]:
    step()
    found, switches = record_dataflow(Fed(step))
    assert found is not None
    return found, switches


def verdicts(step: Callable[[], object]) -> dict[str, Counter[str]]:
    found, _ = watched(step)
    by_name: dict[str, Counter[str]] = {}
    for number, verdict in zip(found.ops, found.verdicts, strict=True):
        by_name.setdefault(found.names[number], Counter())[verdict] += 1
    return by_name


class Loop:
    """Two layers; `before` runs after the first, `after` after the backward."""

    def __init__(self, between=lambda x: x, after=lambda loop: None, trained=slice(None)) -> None:
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        weights = [*self.first.parameters(), *self.second.parameters()]
        self.optimizer = torch.optim.SGD(weights[trained], lr=0.1, foreach=True)
        self.between, self.after = between, after
        self.batches = cycle([torch.randn(4, 8) for _ in range(3)])

    def __call__(self) -> None:
        self.x = next(self.batches)
        loss = self.second(self.between(torch.relu(self.first(self.x)))).square().mean()
        loss.backward()
        self.after(self)
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_a_plain_step_needs_all_its_operators():
    found = verdicts(Loop())
    assert all(set(counts) == {NEEDED} for counts in found.values())
    assert found["aten::addmm"][NEEDED] == 2


@pytest.mark.parametrize(("read", "letter"), [(True, NEEDED), (False, READ_ONLY)])
def test_what_is_kept_like_what_is_read_of_earlier_steps_is_for_later_ones(read, letter):
    """Experience that is replayed, a queue of keys; not what is kept to be looked at."""
    kept = deque([torch.randn(4, 3)] * 4, maxlen=4)

    def remember(x):
        old = kept.popleft() if read else torch.zeros(4, 3)
        kept.append(torch.tanh(x.detach()[:, :3]))
        return x + old.mean()

    assert verdicts(Loop(remember))["aten::tanh"] == {letter: 1}


def test_a_sparse_update_needs_what_it_is_made_of_and_what_follows_it_lasts():
    """Rows of a table are brought back to length one behind the update."""
    table = nn.Embedding(16, 8, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)

    def step():
        ids = torch.randperm(16)[:4]
        table(ids).tanh().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            table.weight.index_copy_(0, ids, F.normalize(table.weight[ids]))

    found = verdicts(step)
    for name in ("embedding", "tanh", "tanh_backward", "linalg_vector_norm", "index_copy_"):
        assert found[f"aten::{name}"] == {NEEDED: 1}, name


def test_gradients_of_weights_that_no_optimizer_has():
    found = verdicts(Loop(trained=slice(2, None)))  # the second layer only
    assert found["aten::mm"] == {NEEDED: 1, UNUSED: 2}  # the first's weight, and the way to it
    assert found["aten::addmm"] == {NEEDED: 2}  # its output is needed


def test_what_only_the_host_reads_or_somebody_holds():
    kept = []
    read = verdicts(Loop(after=lambda loop: loop.first.weight.grad.norm().item()))
    assert read["aten::linalg_vector_norm"] == {READ_ONLY: 1}
    held = verdicts(Loop(after=lambda loop: kept.append(loop.first.weight.grad.norm())))
    assert held["aten::linalg_vector_norm"] == {READ_ONLY: 1}
    dropped = verdicts(Loop(after=lambda loop: loop.first.weight.grad.norm()))
    assert dropped["aten::linalg_vector_norm"] == {UNUSED: 1}


@pytest.mark.parametrize(
    ("join", "unused"),
    [
        (lambda parts: torch.stack(parts)[1], 2),
        (lambda parts: torch.stack(parts, -1)[..., 1], 2),
        (lambda parts: torch.cat(parts, -1).view(4, 3, 8)[:, 1], 2),
        (lambda parts: torch.stack(parts)[1:].sum(0), 1),
        (lambda parts: torch.stack(parts)[torch.tensor([1])][0], 0),  # reads all to choose
        (lambda parts: torch.stack(parts).sum(0), 0),
    ],
)
def test_parts_of_a_concatenation_that_nobody_reads(join, unused):
    teachers = [nn.Linear(8, 8).requires_grad_(False) for _ in range(3)]
    found = verdicts(Loop(between=lambda x: x * join([teacher(x) for teacher in teachers])))
    assert found["aten::addmm"][UNUSED] == unused


def test_a_concatenation_that_somebody_holds_is_read():
    teachers, kept = [nn.Linear(8, 8).requires_grad_(False) for _ in range(3)], []

    def between(x):
        kept.append(torch.stack([teacher(x) for teacher in teachers]))
        return x * kept[-1][1]

    assert UNUSED not in verdicts(Loop(between))["aten::addmm"]


@pytest.mark.parametrize(("below", "untaken"), [(0.0, 2), (2.0, 0), (0.5, 0)])
def test_a_layer_of_which_a_where_takes_nothing(below, untaken):
    """`torch.rand` is in [0, 1). The gradients of the other input are needed."""
    guess = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)

    def between(x, chance=(8, 4, 8)):
        return torch.where(torch.rand(chance) < below, guess(x.detach()), x).mean(0)

    found = verdicts(Loop(between))
    assert found["aten::addmm"] == Counter(
        {NEEDED: 4 - untaken, NOT_TAKEN: untaken} if untaken else {NEEDED: 4}
    )
    few = verdicts(Loop(lambda x: between(x, (8, 1, 1))))
    assert few["aten::addmm"] == {NEEDED: 4}  # 8 samples may all be of one kind by chance


def test_a_transposition_in_place_is_a_view():
    """What it drops is told by who made it."""
    found = verdicts(Loop(lambda x: x + (2 * x).t_()[-1].sum()))
    assert "aten::t_" not in found and found["aten::mul"][PARTLY_USED[3]] == 1  # 7 of 8 columns


def test_gradients_that_a_pass_for_each_weight_computes_again():
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    x = torch.randn(4, 8)

    def step(together):
        weights = [first.weight, second.weight]
        loss = second(first(x).relu()).square().mean()
        if together:
            gradients = torch.autograd.grad(loss, weights)
        else:
            gradients = [torch.autograd.grad(loss, w, retain_graph=True)[0] for w in weights]
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.sub_(gradient, alpha=0.1)

    again = verdicts(lambda: step(together=False))
    # The way from the loss to the second layer, once more; its own gradient is new.
    assert sum(counts[BACKWARD_AGAIN] for counts in again.values()) >= 2
    assert again["aten::mm"] == {NEEDED: 5}
    once = verdicts(lambda: step(together=True))
    summands = verdicts(Loop(lambda x: x.exp() + x.exp()))  # one pass, two equal gradients
    assert all(BACKWARD_AGAIN not in counts for counts in summands.values())
    assert not any(BACKWARD_AGAIN in counts or MADE_BEFORE in counts for counts in once.values())


def test_an_optimizer_of_an_earlier_stage_holds_its_state(monkeypatch):
    loop = Loop()
    head = nn.Linear(64, 64)
    warmup = torch.optim.Adam(head.parameters())
    head(torch.randn(2, 64)).sum().backward()
    warmup.step()
    loop.optimizer = torch.optim.AdamW([*loop.first.parameters()], fused=True)
    alive = [warmup, loop.optimizer]  # not those of other tests
    monkeypatch.setattr(untrained, "live_optimizers", lambda: alive)
    found, _ = watched(loop)
    assert found.idle_state is not None and found.idle_state.optimizers == ("Adam",)
    assert found.idle_state.bytes == 2 * 4 * (64 * 64 + 64)
    alive.remove(warmup)
    assert watched(loop)[0].idle_state is None
    with FakeTensorMode():  # as what traces a model leaves behind
        traced = torch.optim.AdamW([nn.Parameter(torch.ones(4))])
        traced.param_groups[0]["params"][0].grad = torch.ones(4)
        traced.step()
    alive.append(traced)
    assert watched(loop)[0].idle_state is None


@pytest.mark.parametrize(
    ("classes", "read", "letter"),
    [
        (16, lambda x, ids: x[torch.arange(4), ids], PARTLY_USED[-1]),  # one of 16
        (16, lambda x, ids: x.gather(1, ids[:, None]), PARTLY_USED[-1]),
        (4, lambda x, ids: x.gather(1, ids[:, None]), NEEDED),  # a quarter: nobody can leave it out
        (16, lambda x, ids: x.gather(1, ids[:, None]) + x.sum(), NEEDED),
        (16, lambda x, ids: x.sum() + x.gather(1, ids[:, None]), NEEDED),
    ],
)
def test_channels_of_which_an_index_takes_one(classes, read, letter):
    head, ids = nn.Linear(8, classes), torch.tensor([0, 3, 1, 2])
    found = verdicts(Loop(lambda x: x + read(head(x), ids).sum()))
    assert found["aten::addmm"][letter] == (1 if letter != NEEDED else 3)


def test_the_value_of_the_action_that_was_taken_is_for_nobody_to_compute_alone():
    """Of 64 rows each gives one of 8 columns: rows of weights for each would be larger."""
    head, taken = nn.Linear(8, 8), torch.randint(8, (64, 1))
    rows = torch.randn(64, 1)
    found = verdicts(Loop(lambda x: x + head(x.mean(0) * rows).gather(1, taken).mean()))
    assert set(found["aten::addmm"]) == {NEEDED}


@pytest.mark.parametrize(("kinds", "copied"), [(4, True), (80, False)])
def test_rows_of_a_small_table_that_an_index_copies(kinds, copied):
    """A network on one-hot rows of 4 kinds computes 4; those of 80 are an embedding."""
    table, network = torch.eye(kinds), nn.Linear(kinds, 8)
    loop = Loop(lambda x: x + network(table[torch.randint(kinds, (1280,))]).mean())
    loop.optimizer.add_param_group({"params": list(network.parameters())})
    found = verdicts(loop)
    assert bool(set(found["aten::addmm"]) & set(COPIED_ROWS)) == copied


@pytest.mark.parametrize(("rate", "tenths"), [(4, "7"), (2, NEEDED)])
def test_a_convolution_of_samples_with_zeros_between_them(rate, tenths):
    convolution = nn.Conv1d(8, 8, 3, padding=1)

    def between(x):
        wide = x.new_zeros(1, 8, 4 * rate)
        wide[:, :, ::rate] = x.T.exp()
        return x + convolution(wide).mean()

    assert set(verdicts(Loop(between))["aten::convolution"]) == {tenths}
    spread = verdicts(Loop(lambda x: x + convolution(F.dropout(x.T[None], 0.75)).mean()))
    assert set(spread["aten::convolution"]) == {NEEDED}  # zeros by chance


def test_a_storage_is_not_written_out(monkeypatch):
    """`copy.deepcopy` of a tensor hands one to an operator; its text is a line for each byte."""

    def written_out(storage):
        raise AssertionError("written out")

    monkeypatch.setattr(torch.UntypedStorage, "__repr__", written_out)
    kept = []
    found, _ = watched(Loop(after=lambda loop: kept.append(copy.deepcopy(loop.x))))
    assert found.ops


def test_what_is_computed_twice_from_the_same_inputs():
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    again = verdicts(Loop(lambda x: checkpoint(layer, x, use_reentrant=False)))
    assert again["aten::addmm"] == {NEEDED: 3, MADE_BEFORE: 1}
    assert again["aten::bernoulli_"] == {NEEDED: 1, MADE_BEFORE: 1}
    # A pass for a metric comes first: it is the one that nothing needs.
    metric = verdicts(Loop(lambda x: 0 * layer[0](x).sum().item() + layer[0](x)))
    assert metric["aten::addmm"] == {NEEDED: 3, READ_ONLY: 1}
    twice = verdicts(Loop(lambda x: layer(x) + layer[1](x)))
    assert twice["aten::bernoulli_"] == {NEEDED: 2}  # other random numbers


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize(
    ("made", "name"),
    [
        (lambda x, y: x @ y.T, "aten::mm"),
        (lambda x, y: torch.stack((x, x + 1)) @ torch.stack((y, y + 1)).mT, "aten::bmm"),
        (torch.cdist, "aten::_cdist_forward"),
        (lambda x, y: torch.cdist(x.repeat(8, 1), y.repeat(8, 1)), "aten::_euclidean_dist"),
    ],
)
def test_a_product_of_the_same_two_in_the_other_order(made, name, once):
    """Images and texts, points of two clouds: the second matrix is the first one's transpose."""
    other = torch.randn(4, 8)

    def compared(x):
        there = made(x, other)
        back = there.mT if once else made(other, x)
        return x * (there.softmax(-1).mean() + back.softmax(-1).mean())

    found = verdicts(Loop(compared))
    assert found[name][MADE_BEFORE] == (0 if once else 1)
    assert found["aten::_softmax"] == {NEEDED: 2}  # of rows, and of columns
    assert found["aten::addmm"] == {NEEDED: 2}


def test_weights_that_autocast_casts_again_whenever_it_is_left():
    layer = nn.Linear(8, 8)

    def cell(x):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)

    def twice(x):
        return (cell(x) + cell(x)).float()

    def once(x):
        with torch.autocast("cpu", torch.bfloat16):
            return twice(x)

    assert verdicts(Loop(twice))["aten::_to_copy"][CAST_AGAIN] == 2  # weight and bias
    assert verdicts(Loop(once))["aten::_to_copy"][CAST_AGAIN] == 0


def per_row(x):
    """Return each row's own numbers."""
    return torch.randn(len(x) * 12, 8)


COPY = torch.randint(4, (48,))
LAYER, CONV, NORM = nn.Linear(8, 8), nn.Conv2d(8, 8, 1), nn.LayerNorm(8)
TABLE, KERNEL = nn.Embedding(4, 8), torch.randn(8, 8, 3, 3)


@pytest.mark.parametrize(
    ("between", "name", "letter"),
    [
        (lambda x: LAYER(x.repeat_interleave(12, 0)), "aten::addmm", "C"),
        (lambda x: LAYER(x.repeat(12, 1)), "aten::addmm", "C"),
        (lambda x: LAYER(x[:, None].expand(-1, 5, -1)).flatten(0, 1), "aten::mm", "B"),
        (lambda x: LAYER(x[COPY]), "aten::addmm", "C"),
        (lambda x: LAYER(x.index_select(0, COPY)), "aten::addmm", "C"),
        (
            lambda x: LAYER(x[None].gather(1, COPY[None, :, None].expand(1, 48, 8))[0]),
            "aten::addmm",
            "C",
        ),
        (
            lambda x: CONV(x[:, :, None, None].expand(-1, -1, 6, 6)).mean((2, 3)),
            "aten::convolution",
            "E",
        ),
        (lambda x: NORM(x.repeat_interleave(12, 0)), "aten::native_layer_norm", "C"),
        # What is the same for all copies, or copied alike, leaves them copies.
        (lambda x: LAYER(2 * x[COPY] + x.mean(0)), "aten::addmm", "C"),
    ],
)
def test_rows_that_are_computed_for_each_of_their_copies(between, name, letter):
    found = verdicts(Loop(between))
    assert found[name][letter] >= 1  # the layer behind it takes them too


def windows(x, step: int):
    """Return windows of eight of 32 rows, row after row, of which each begins `step` rows later."""
    frames = x.view(32, 1) + torch.arange(8.0)
    return frames.unfold(0, 8, step).mT.reshape(-1, 8)


# 7 windows have 56 rows, 25 of them 200.
@pytest.mark.parametrize(("step", "letters"), [(1, "B"), (4, "A"), (8, "")])
def test_rows_of_windows_that_overlap_are_computed_again(step, letters):
    found = verdicts(Loop(lambda x: LAYER(windows(x, step))))
    assert set(found["aten::addmm"]) & set(COPIED_ROWS) == set(letters)


def test_all_that_follows_the_first_product_is_computed_again():
    found = verdicts(Loop(lambda x: torch.tanh(LAYER(torch.sin(x.repeat(12, 1))))))
    assert found["aten::sin"] == {NEEDED: 1} and found["aten::tanh"]["C"] == 1
    assert found["aten::repeat"] == {ROWS_COPIED: 1}


@pytest.mark.parametrize(
    "between",
    [
        lambda x: LAYER(x.repeat_interleave(12, 0) + per_row(x)),
        lambda x: LAYER(x[:, None].expand(4, 12, 8) + torch.randn(12, 8)).flatten(0, 1),
        lambda x: LAYER(x[COPY] + x[COPY.flip(0)]),  # pairs of rows
        lambda x: LAYER(torch.cat([x[COPY], per_row(x)])),
        lambda x: LAYER(F.dropout(x.repeat(12, 1))),
        lambda x: LAYER(x)[COPY] + per_row(x),  # multiplied first
        lambda x: LAYER(x[COPY[:12]]),  # not so many
        lambda x: x.sum() + LAYER(TABLE(COPY)),
        lambda x: F.scaled_dot_product_attention(  # one head of keys for many of queries
            per_row(x).view(4, 3, 4, 8), *[x.view(1, 1, 4, 8).expand(4, 3, 4, 8)] * 2
        ).reshape(48, 8),
        lambda x: (x.repeat(12, 1) - per_row(x)).square(),  # labels
        lambda x: F.conv2d(x[:, :, None, None].expand(4, 8, 6, 6), KERNEL, padding=1).mean((2, 3)),
    ],
)
def test_rows_that_something_of_their_own_is_added_to(between):
    found = sum(verdicts(Loop(between)).values(), Counter())
    assert not set(found) & set(COPIED_ROWS)


def penalized(penalty: Callable[[nn.Parameter], torch.Tensor]) -> Counter[str]:
    """Return the verdicts on a step whose loss has a term of a trained weight."""
    layer = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, foreach=True)
    batches = cycle([torch.randn(4, 8) for _ in range(3)])

    def step() -> None:
        loss = layer(next(batches)).square().mean() + 0.1 * penalty(layer.weight)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return sum(verdicts(step).values(), Counter())


@pytest.mark.parametrize(
    "penalty",
    [lambda w: w.square().sum(), lambda w: w.norm() ** 2, lambda w: (2 * w).abs().mean() + w.sum()],
)
def test_a_number_that_is_made_of_weights_alone_is_a_penalty(penalty):
    # The product with 0.1 counts, what it is added to does not.
    assert penalized(penalty)[PENALTY] >= 3


def test_weights_that_are_changed_for_a_layer_are_no_penalty():
    x = torch.randn(4, 8)
    assert not penalized(lambda w: (x @ (w / w.norm())).mean())[PENALTY]
    assert not penalized(lambda w: (x @ (w * 8).round().div(8).T).mean())[PENALTY]


def test_a_loss_of_weight_zero_is_for_nothing():
    layer = nn.Linear(8, 8)

    def weighed(weight: float) -> Counter[str]:
        loop = Loop(lambda x: x + weight * torch.tanh(layer(x)).square().mean())
        return sum(verdicts(loop).values(), Counter())

    assert weighed(0.5)[TIMES_ZERO] == 0
    # Forward: a product, tanh, square, mean, times zero; backward: all of its gradients.
    assert weighed(0.0)[TIMES_ZERO] >= 5


@pytest.mark.parametrize(("kept", "letter"), [(8, NEEDED), (3, NEEDED), (2, "X"), (1, "Y")])
def test_results_of_which_most_is_dropped(kept, letter):
    wide = nn.Linear(8, 64)

    def taken(x):
        return wide(x).view(4, 8, 8)[:, :kept].sum(1)

    if kept == 3:  # three quarters, each by itself

        def taken(x):
            first, second, third, _ = wide(x).view(4, 4, 16).unbind(1)
            return (first + second + third)[:, :8]

    found = verdicts(Loop(taken))["aten::addmm"]
    assert found == ({NEEDED: 3} if letter == NEEDED else {NEEDED: 2, letter: 1})


def test_what_is_the_same_in_every_step():
    def masked(x):
        return x + torch.full((4, 8), -1.0).triu(1)

    found = verdicts(Loop(masked))
    assert found["aten::full"] == found["aten::triu"] == {CONSTANT: 1}
    zeros = verdicts(Loop(lambda x: torch.zeros(4, 8).index_add(0, torch.arange(4), x)))
    assert zeros["aten::zeros"] == {NEEDED: 1} and zeros["aten::arange"] == {CONSTANT: 1}


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize(("frozen", "given"), [(True, False), (False, True), (True, True)])
def test_what_two_steps_find_as_it_was(sliced, frozen, given):
    """A frozen tower on prompts that stay, beside batches that change, also as slices of one.

    The optimizer may have been given the frozen weights with all the others.
    """
    tower, prompts = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(16, 8)
    loop = Loop(lambda x: x @ tower(prompts)[:8])
    if sliced:
        loop.batches = cycle(torch.randn(3, 4, 8))
    tower.requires_grad_(not frozen)
    if given:
        loop.optimizer.add_param_group({"params": list(tower.parameters())})
    found = verdicts(loop)
    assert found["aten::gelu"] == {UNCHANGED if frozen else NEEDED: 1}
    assert found["aten::addmm"] == ({NEEDED: 2, UNCHANGED: 1} if frozen else {NEEDED: 3})
    assert watched(loop)[0].fresh


@pytest.mark.parametrize("fixed", [True, False])
def test_a_sparse_matrix_that_is_made_of_what_stays(fixed):
    """The adjacency of one graph, or of a graph that the batch brings."""
    edges, ones = torch.tensor([[0, 1, 3, 2], [1, 0, 2, 3]]), torch.ones(4)

    def propagate(x):
        weights = ones if fixed else x.detach()[:, 0]
        adjacency = torch.sparse_coo_tensor(edges, weights, (4, 4), check_invariants=False)
        return torch.sparse.mm(adjacency.coalesce(), x)

    found = verdicts(Loop(propagate))
    letter = UNCHANGED if fixed else NEEDED
    for name in ("_sparse_coo_tensor_with_dims_and_tensors", "_coalesce"):
        assert found[f"aten::{name}"][letter] == 1
    assert found["aten::_sparse_addmm"] == {NEEDED: 1}


def test_a_fused_attention_without_dropout_draws_nothing():
    q = torch.randn(1, 2, 8, 8)
    for dropout, letter in ((0.0, UNCHANGED), (0.5, NEEDED)):
        attended = Loop(
            lambda x, p=dropout: x * F.scaled_dot_product_attention(q, q, q, dropout_p=p).mean()
        )
        found = verdicts(attended)
        attention = [name for name in found if "scaled_dot_product" in name or "bmm" in name]
        assert found[attention[-1]][letter] == 1  # with dropout q k^T, drawn for the second only


def test_a_convolution_by_fourier_transforms_drops_its_padding():
    kernel = torch.randn(8)

    def mixed(x):
        return torch.fft.irfft(torch.fft.rfft(x, n=16) * torch.fft.rfft(kernel, n=16), n=16)[:, :8]

    assert verdicts(Loop(mixed))["aten::_fft_c2r"] == {NEEDED: 1}


def test_a_batch_of_the_feed_is_no_constant_though_it_stays():
    loop, batch = Loop(), torch.randn(4, 8)
    loop.first.requires_grad_(False)
    loop.optimizer = torch.optim.SGD(loop.second.parameters(), lr=0.1)
    loop.batches = repeat(batch)
    fed = Fed(loop)
    assert set(record_dataflow(fed)[0].verdicts) >= {UNCHANGED}
    fed.feed = repeat(batch)
    found = record_dataflow(fed)[0]
    assert found.fresh and UNCHANGED not in found.verdicts


def test_a_batch_that_is_always_the_same_is_told():
    loop = Loop()
    loop.batches = repeat(torch.randn(4, 8))
    assert not watched(loop)[0].fresh
    loop.first.requires_grad_(False)
    loop.optimizer = torch.optim.SGD(loop.second.parameters(), lr=0.1)
    assert verdicts(loop)["aten::relu"] == {UNCHANGED: 1}


def test_a_product_with_a_factor_of_zeros():
    ids = torch.randint(256, (256,))

    def dispatched(x):
        wide = x.repeat(64, 64)[:256, :256]
        chosen = nn.functional.one_hot(ids, 256).to(x.dtype)
        return x * (chosen @ (wide @ wide)).mean()

    found = verdicts(Loop(dispatched))
    assert found["aten::mm"][ZEROS] == 2  # forward, and the gradient of the other factor


def test_zeros_in_sums_in_kernels_and_in_what_the_batch_brings():
    def summed(x):
        chosen = torch.arange(64)[:, None, None].expand(64, 1, 256)
        wide = torch.zeros(64, 64, 256).scatter(1, chosen, x.mean().expand(64, 1, 256))
        return x + wide.sum(0).mean()

    found = verdicts(Loop(summed))
    assert found["aten::scatter"] == {ZEROS: 1} and found["aten::sum"][ZEROS] == 1

    blur = torch.diag_embed(torch.ones(3, 3, 16)).permute(2, 3, 0, 1)  # channel by channel
    image = nn.Conv2d(1, 16, 1)

    def blurred(x, kernel=blur, **how):
        return x * F.conv2d(image(x.view(1, 1, 4, 8)), kernel, padding=1, **how).mean()

    assert verdicts(Loop(blurred))["aten::convolution"] == {NEEDED: 1, ZEROS: 1}
    narrow = torch.ones(16, 1, 3, 3)
    grouped = verdicts(Loop(lambda x: blurred(x, narrow, groups=16)))
    assert grouped["aten::convolution"] == {NEEDED: 2}

    graph = torch.eye(512)
    found = verdicts(Loop(lambda x: x + (graph @ x.repeat(128, 16)).mean()))
    assert found["aten::mm"][ZEROS] == 2  # and for the gradient


def test_an_average_of_weights_that_stay_as_they_are():
    frozen, learned = torch.randn(2**20), torch.randn(2**20)
    averages = [frozen.clone(), torch.zeros(2**20)]

    def averaged(loop):
        torch._foreach_lerp_(averages, [frozen, learned], 0.01)

    assert verdicts(Loop(after=averaged))["aten::_foreach_lerp_"] == {UNMOVED[0]: 1}  # half of it
    averages[0] = torch.zeros(2**20)
    assert verdicts(Loop(after=averaged))["aten::_foreach_lerp_"] == {NEEDED: 1}


def test_a_linear_layer_of_which_only_the_mean_is_read():
    head, image = nn.Linear(8, 16), nn.Conv2d(1, 16, 1)

    def pooled(x, layer=head, view=(4, 1, 8), dims=(0, 1)):
        return x + layer(x.view(view)).mean(dims).mean()

    assert verdicts(Loop(pooled))["aten::addmm"] == {NEEDED: 2, POOLED: 1}
    columns = verdicts(Loop(lambda x: pooled(x, dims=(0, 2))))
    assert columns["aten::addmm"] == {NEEDED: 3}
    whole = verdicts(Loop(lambda x: pooled(x, image, (1, 1, 4, 8), (2, 3))))
    assert whole["aten::convolution"] == {POOLED: 1}
    read = verdicts(Loop(lambda x: x + (y := head(x)).mean(0).mean() + y.relu().mean()))
    assert read["aten::addmm"] == {NEEDED: 3}


def test_lookups_of_which_only_the_mean_is_read():
    table = nn.Embedding(16, 8).requires_grad_(False)

    def looked_up(x):
        return table((x.abs() * 99).long() % 16)  # 4 x 8 of them

    mean = verdicts(Loop(lambda x: x + looked_up(x).mean(1)))
    assert mean["aten::embedding"] == {POOLED: 1}
    read = verdicts(Loop(lambda x: x + (y := looked_up(x)).mean(1) + y.relu().mean(1)))
    assert read["aten::embedding"] == {NEEDED: 1}
    widths = verdicts(Loop(lambda x: x + looked_up(x).mean(2)))
    assert widths["aten::embedding"] == {NEEDED: 1}


def test_running_means_as_products_with_a_triangle():
    ones = torch.tril(torch.ones(512, 512))

    def averaged(x, matrix):
        return x + (matrix @ x.repeat(128, 16)).square().mean()  # 512 x 512 by 512 x 128

    def letters(matrix):
        return verdicts(Loop(lambda x: averaged(x, matrix)))["aten::mm"]

    for matrix in (ones, ones / ones.sum(1, keepdim=True), ones.T, (ones / ones.sum(0)).T):
        assert letters(matrix)[RUNNING] == 2  # and the gradient
    decay = torch.tril(0.9 ** (torch.arange(512)[:, None] - torch.arange(512)).clamp(0))
    assert RUNNING not in letters(decay)  # no sum of all that came before
    assert RUNNING not in letters(torch.rand(512, 512).round())


def test_copies_of_weights_that_nothing_reads():
    layer = nn.Linear(256, 256)
    loop = Loop(lambda x: x + layer(x.repeat(1, 32)).mean())
    loop.checkpoint = {"weight": layer.weight.detach().clone(), "data": torch.zeros(999, 999)}
    found = watched(loop)[0].idle_copies
    assert found.bytes == 256 * 256 * 4 and "checkpoint" in " ".join(found.held_by)
    del loop.checkpoint
    assert watched(loop)[0].idle_copies is None
    loop.batches = cycle(batches := [torch.randn(256, 256) for _ in range(4)])
    loop.first = nn.Linear(256, 8)
    assert watched(loop)[0].idle_copies is None and len(batches) == 4  # batches like the weight


def test_frozen_weights_that_equal_others():
    layer = nn.Linear(256, 256).requires_grad_(False)
    loop = Loop(lambda x: x + (layer(x.repeat(1, 32)) + loop.reference(x.repeat(1, 32))).mean())
    loop.reference = copy.deepcopy(layer)
    found = watched(loop)[0].equal_weights
    assert (found.weights, found.bytes, found.names) == (1, 256 * 256 * 4, ("weight",))
    assert any(place.startswith("reference") for place in found.held_by)
    nn.init.normal_(loop.reference.weight)
    assert watched(loop)[0].equal_weights is None  # another teacher
    loop.reference = layer
    assert watched(loop)[0].equal_weights is None  # the same module
    layer.weight.fill_(1.0)
    loop.reference = copy.deepcopy(layer)
    assert watched(loop)[0].equal_weights is None  # as new layers often are
    nn.init.normal_(layer.weight)
    loop.reference = copy.deepcopy(layer).requires_grad_(True)
    assert watched(loop)[0].equal_weights is None  # one that is to be trained
    loop.reference = None


def idle_gradients(loop, *models):
    """Of models with these names: other tests may have left some that hold gradients, too."""
    found = watched(loop)[0].idle_gradients
    return {one.name: one for one in found if one.name.startswith(models)}


def test_gradients_that_frozen_weights_still_hold():
    frozen = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = nn.ModuleDict({"stale": frozen})
    frozen(torch.randn(4, 8)).sum().backward()
    loop = Loop(model.requires_grad_(False).stale)
    found = idle_gradients(loop, "stale")
    weights = IdleGradients("stale.*.weight", 2, 2 * 8 * 8 * 4, asked=False)
    assert found["stale.*.weight"] == weights and found["stale.*.bias"].bytes == 2 * 8 * 4
    frozen.zero_grad()
    assert not idle_gradients(loop, "stale")


@pytest.mark.parametrize("cleared", [False, True])
def test_weights_that_require_gradients_though_nothing_updates_them(cleared):
    """Whether anybody clears the gradients or not; but not those that a loop updates itself."""
    model = nn.ModuleDict({"mine": nn.Linear(8, 8, bias=False), "by_hand": nn.Linear(8, 8)})

    def after(loop):
        with torch.no_grad():
            for weight in model.by_hand.parameters():
                weight -= 0.1 * weight.grad
                weight.grad = None
        if cleared:
            model.zero_grad()

    found = idle_gradients(Loop(lambda x: model.mine(model.by_hand(x)), after), "mine", "by_hand")
    held = 0 if cleared else 8 * 8 * 4
    assert found == {"mine.weight": IdleGradients("mine.weight", 1, held, asked=True)}


@pytest.mark.parametrize(
    ("dtype", "graph", "copies"),
    [(torch.float32, True, 32**2), (torch.float32, False, 0), (torch.bfloat16, True, None)],
)
def test_frozen_weights_that_every_step_casts(dtype, graph, copies):
    """Their copies live until the backward, unless nothing before them is trained."""
    frozen = nn.Sequential(*(nn.Linear(32, 32, bias=False, dtype=dtype) for _ in range(2)))
    frozen.requires_grad_(False)

    def between(x):
        with torch.autocast("cpu", torch.bfloat16):
            return x + frozen((x if graph else x.detach()).repeat(1, 4)).float()[:, :8]

    found = watched(Loop(between))[0].frozen_casts
    if copies is None:
        assert found is None
    else:
        expected = FrozenCasts(2, 2 * 32**2 * 4, 2 * 2 * copies, ("*.weight",))
        assert found == expected
    averaged = Loop(
        between,
        lambda loop: [p.lerp_(torch.ones(32, 32, dtype=dtype), 0.1) for p in frozen.parameters()],
    )
    assert watched(averaged)[0].frozen_casts is None  # an average needs its bits


def test_a_table_that_is_also_the_head_is_told():
    table, head = nn.Embedding(64, 8), nn.Linear(8, 64, bias=False)
    ids = torch.arange(4)

    def looked_up(x):
        return x + head(table(ids)).mean()

    assert watched(Loop(looked_up))[0].tied_tables == ()
    head.weight = table.weight
    assert watched(Loop(looked_up))[0].tied_tables == (64 * 8,)

    def copied(x):
        return x + (table(ids) @ table.weight.t().contiguous()).mean()

    assert watched(Loop(copied))[0].tied_tables == (64 * 8,)


def test_switches_that_a_part_of_the_step_turns_on():
    def careful(x):
        with torch.autograd.detect_anomaly(check_nan=False):
            return x + 1

    with pytest.warns(UserWarning, match="Anomaly"):
        _, switches = watched(Loop(careful))
    assert switches == {"anomaly mode"} and switches_on({}) == ()
    assert switches_on({"CUDA_LAUNCH_BLOCKING": "1"}) == ("CUDA_LAUNCH_BLOCKING=1",)


def test_modes_that_take_every_operator():
    def counted(x):
        with FlopCounterMode(display=False):
            return torch.relu(x).square().sum(0) + x

    _, switches = watched(Loop(counted))
    assert switches == {"the mode FlopCounterMode"}


def test_padding_of_token_ids():
    table = nn.Embedding(50, 8)
    ids = torch.randint(1, 50, (16, 64))
    ids[:, 32:] = 0
    found, _ = watched(Loop(lambda x: x + table(ids).mean((0, 1))))
    assert found.padding == pytest.approx(31 / 63, abs=0.02)
    model = nn.Module()
    model.register_buffer("apart", ids)  # distances that end with the farthest one, no batch
    built, _ = watched(Loop(lambda x: x + table(model.apart).mean((0, 1))))
    made, _ = watched(Loop(lambda x: x + table(torch.arange(512).view(8, 64).clamp(max=9)).sum()))
    assert built.padding == made.padding == 0


@pytest.mark.parametrize("kind", ["linear", "convolution", "lstm"])
def test_padding_of_frames(kind):
    """What a layer takes of the data; not a mask of single frames, and not what a layer made."""
    frames = torch.randn(8, 40, 16)
    layer = {
        "linear": nn.Linear(16, 8),
        "convolution": nn.Conv1d(16, 8, 3),
        "lstm": nn.LSTM(16, 8, batch_first=True),
    }[kind]

    def used(frames):
        out = layer(frames.mT if kind == "convolution" else frames)
        return (out[0] if kind == "lstm" else out).mean()

    padded, masked = frames.clone(), frames.clone()
    padded[:, 20:] = 0
    masked[:, ::2] = 0
    assert watched(Loop(lambda x: x + used(padded)))[0].padding == pytest.approx(0.5)
    assert watched(Loop(lambda x: x + used(masked)))[0].padding == 0
    assert watched(Loop(lambda x: x + used(padded * x.mean())))[0].padding == 0


def test_a_product_with_rows_of_zeros():
    weight = nn.Parameter(torch.randn(256, 256))

    def padded(x):
        rows = nn.functional.pad(x.repeat(16, 32), (0, 0, 0, 192))  # 64 of 256 rows
        return x * (rows @ weight).mean()

    counts = verdicts(Loop(padded))["aten::mm"]
    assert sum(counts[tenths] for tenths in ROWS_OF_ZEROS) == 2  # forward, and the weight


def test_a_gate_that_is_written_over_has_been_read():
    """A recurrent layer adds to each of its gates in place, one after the other."""
    gates = nn.Linear(8, 24)

    def cell(x):
        with torch.no_grad():
            all_gates = gates(x)
            first, second, third = all_gates.chunk(3, 1)
            first.sigmoid_()
            second.sigmoid_()
        return x + first + second * third

    assert verdicts(Loop(cell))["aten::addmm"] == {NEEDED: 3}


@pytest.mark.parametrize("asked", [True, False])
def test_the_gradient_of_an_input_that_nobody_reads(asked):
    conv = nn.Conv2d(3, 4, 3)
    images = torch.randn(1, 3, 8, 8)

    def convolved(x):
        return x * conv(images.detach().requires_grad_() if asked else images).mean()

    letter = IDLE_GRADIENT if asked else NEEDED
    loop = Loop(convolved)
    loop.optimizer.add_param_group({"params": conv.parameters()})
    assert verdicts(loop)["aten::convolution_backward"] == {letter: 1}


@pytest.mark.parametrize("way", ["all gradients", "the image's alone"])
def test_an_attack_that_fills_gradients_which_are_cleared_unread(way):
    """A backward for the image meets the gradients of the last step, and zero_grad takes both."""
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten())
    model.append(nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    image = torch.randn(2, 4, 8, 8)

    def step() -> None:
        moved = image.clone().requires_grad_()
        loss = model(moved).square().mean()
        if way == "all gradients":
            loss.backward()
            slope = moved.grad
        else:
            (slope,) = torch.autograd.grad(loss, moved)
        optimizer.zero_grad()
        model(image + slope.sign()).square().mean().backward()
        optimizer.step()

    found = verdicts(step)
    dropped = way == "all gradients"
    assert found["aten::convolution_backward"][IDLE_WEIGHT] == (2 if dropped else 0)
    assert found["aten::convolution_backward"][NEEDED] == (2 if dropped else 4)
    assert found["aten::mm"][UNUSED] == (1 if dropped else 0)


def test_gradients_that_later_steps_add_to_are_kept():
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.1), cycle((False, True, False))

    def step() -> None:
        model(torch.ones(2, 4, 8, 8)).square().mean().backward()
        if next(steps):
            optimizer.step()
            optimizer.zero_grad()

    step()
    assert set(verdicts(step)["aten::convolution_backward"]) == {NEEDED}


def test_a_frozen_convolution_whose_weights_ask_for_gradients():
    first, frozen = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)

    def step() -> None:
        frozen(first(torch.ones(2, 4, 8, 8))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert verdicts(step)["aten::convolution_backward"] == {IDLE_WEIGHT: 1, NEEDED: 1}
    frozen.requires_grad_(False)
    assert verdicts(step)["aten::convolution_backward"] == {NEEDED: 2}


def test_an_average_that_is_computed_anew_and_copied_over():
    average = nn.Parameter(torch.zeros(8, 8), requires_grad=False)

    def loaded(loop):
        with torch.no_grad():
            average.copy_(0.9 * average + 0.1 * loop.first.weight)

    def moved(loop):
        with torch.no_grad():
            average.lerp_(loop.first.weight, 0.1)

    found = verdicts(Loop(after=loaded))
    assert found["aten::copy_"] == {COPIED_OVER: 1} and found["aten::add"][COPIED_OVER] == 1
    assert found["aten::mul"][COPIED_OVER] == 2
    assert all(set(counts) == {NEEDED} for counts in verdicts(Loop(after=moved)).values())


@pytest.mark.parametrize(("window", "letter"), [(32, MASKED[2]), (90, MASKED[1]), (300, NEEDED)])
@pytest.mark.parametrize("fused", [True, False])
def test_scores_that_a_mask_leaves_out(window, letter, fused):
    behind = torch.arange(512)[:, None] - torch.arange(512)
    mask = (behind >= 0) & (behind < window)
    project = nn.Linear(8, 512)

    def attended(x):
        q = project(x).mean(0).view(1, 1, 512, 1)
        if fused:
            return x + F.scaled_dot_product_attention(q, q, q, attn_mask=mask).mean()
        return x + ((q @ q.mT).masked_fill(~mask, -1e9).softmax(-1) @ q).mean()

    name = "aten::_scaled_dot_product_flash_attention_for_cpu" if fused else "aten::_softmax"
    assert verdicts(Loop(attended))[name] == {letter: 1}


CAUSAL = torch.ones(256, 256, dtype=torch.bool).tril()
HIDDEN = torch.zeros(2, 1, 256, 256).masked_fill(~CAUSAL, -1e9)


@pytest.mark.parametrize(
    ("mask", "causal"),
    {
        "booleans": (CAUSAL, True),
        "numbers": (HIDDEN, True),
        "numbers in 16 bits": (HIDDEN.bfloat16(), True),
        "not itself": (CAUSAL.tril(-1) | torch.eye(256, dtype=torch.bool).roll(1, 0), False),
        "one more": (CAUSAL | CAUSAL.roll(-1, 0), False),
        "a prefix": (CAUSAL | (torch.arange(256) < 128), False),
        "two documents": (
            CAUSAL & (torch.arange(256) >= 128 * (torch.arange(2) > 0)[:, None, None])[:, None],
            False,
        ),
        "with a bias": (HIDDEN - 0.1 * torch.arange(256), False),
        "all": (torch.zeros(256, 256), False),
    }.values(),
)
def test_a_mask_that_says_no_more_than_is_causal(mask, causal):
    project = nn.Linear(8, 2 * 256)

    def attended(x):
        q = (
            project(x)
            .mean(0)
            .view(2, 1, 256, 1)
            .to(mask.dtype if mask.is_floating_point() else x.dtype)
        )
        return x + F.scaled_dot_product_attention(q, q, q, attn_mask=mask).float().mean()

    found = verdicts(Loop(attended))["aten::_scaled_dot_product_flash_attention_for_cpu"]
    assert (found == {CAUSAL_MASK: 1}) == causal


@pytest.mark.parametrize("share", [0.0, 0.25, 0.75])
def test_labels_that_the_loss_ignores(share):
    labels = torch.randint(8, (100,))
    labels[: int(100 * share)] = -100
    head = nn.Linear(8, 8 * 100)
    loop = Loop(lambda x: x + F.cross_entropy(head(x).mean(0).view(100, 8), labels))
    assert record_dataflow(Fed(loop))[0].ignored == pytest.approx(share)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(256, 256).tril())


def test_buffers_that_nothing_reads_or_that_equal_another():
    one, other, unread = Masked(), Masked(), Masked()
    found, _ = watched(Loop(lambda x: x + one.mask[:4, :8] + other.mask[:4, :8]))
    (buffers,) = [b for b in found.buffers if b.name == "Masked.mask"]
    assert buffers.unread == unread.mask.nbytes and buffers.copies == other.mask.nbytes


@pytest.mark.parametrize("recurrent", [True, False])
def test_a_cell_that_is_called_on_its_own_results(recurrent):
    cell = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    def called(x):
        results = [x]
        for _ in range(3):
            results.append(cell(results[-1] if recurrent else x))
        return sum(results)

    assert watched(Loop(called))[0].feeds_itself == recurrent


def compiled(function):
    """Compile quickly: what is watched is the code, whatever the backend makes of it."""
    return torch.compile(function, backend="eager")


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.usefixtures("_fresh_compiler")
def test_values_are_followed_through_compiled_code():
    layer = nn.Linear(8, 8)

    def weighed(weight: float) -> Dataflow:
        branch = compiled(lambda x: x + weight * torch.tanh(layer(x)).square().mean())
        loop = Loop(branch)
        if trained:
            loop.optimizer.add_param_group({"params": layer.parameters()})
        return watched(loop)[0]

    trained = False
    assert [one.verdict for one in weighed(0.5).graphs] == [UNUSED]  # its gradients
    trained = True
    assert weighed(0.5).graphs == ()
    found = weighed(0.0)
    (waste,) = found.graphs
    assert waste.verdict == TIMES_ZERO and waste.flops == 1.0 and 0.5 < waste.bytes < 1
    assert "test_dataflow.py" in waste.line
    # What is compiled is no part of the rest: two layers, and one update of four tensors.
    assert "aten::tanh" not in found.names and set(found.verdicts) == {NEEDED}


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("reads", [False, True])
def test_outputs_of_compiled_code_that_nobody_reads(reads):
    @compiled
    def both(x):
        squares = x.square()
        return (x + squares).tanh(), squares

    def taken(x):
        result, squares = both(x)
        return result + squares if reads else result

    graphs = watched(Loop(taken))[0].graphs
    assert [one.verdict for one in graphs] == ([] if reads else [UNREAD_OUTPUT])
    if not reads:
        assert "(taken)" in graphs[0].line and graphs[0].bytes == 3 / 6


@pytest.mark.usefixtures("_fresh_compiler")
def test_what_nothing_reads_inside_a_graph_a_compiler_drops():
    @compiled
    def careful(x):
        x.square().norm()
        return x.tanh()

    assert watched(Loop(careful))[0].graphs == ()


@pytest.mark.parametrize(("dim", "again"), [(-1, True), (1, True), (0, False)])
def test_a_dimension_may_be_counted_from_the_end(dim, again):
    """`F.cross_entropy` takes the dimension 1 of a matrix, which is its last."""
    classes = torch.tensor([1, 5, 2, 7])
    loop = Loop(
        lambda x: x + F.cross_entropy(x.double(), classes) + F.log_softmax(x.double(), dim).mean()
    )
    found = verdicts(loop)["aten::_log_softmax"]
    assert found == Counter({NEEDED: 1, MADE_BEFORE: 1} if again else {NEEDED: 2})
