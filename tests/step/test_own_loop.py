"""What people do in a loop of their own, against the same loop written by hand in torch."""

import copy
import inspect
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import steplab
from steplab.core.errors import Unsupported, UserError
from steplab.modules.optimizer import OnePassAdamW
from steplab.probes.compilation import graph_count
from steplab.step.graph import graph_step
from steplab.step.hooks import HookGuard
from steplab.step.usual_shapes import OTHERS_IN_A_ROW, UsualShapes
from tests.step.tape_graphs import TapeGraphs

COMPILED = "compile=blocks,compile.backend=eager"


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(x).tanh()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def loss_of(model, batch):
    return (model(batch) - 1).square().mean()


def sgd(model, **how):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **how)


def adamw(model, **how):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, **how)


def one_pass(model):
    return OnePassAdamW.from_adamw(adamw(model))


class Twins:
    """A steplab step, captured by a tape where asked for, and a model and optimizer by hand."""

    def __init__(self, recipe, optimizer=sgd, by_hand=None, captured=False, clip=0.0):
        torch.manual_seed(0)
        self.hand = Net()
        self.model = copy.deepcopy(self.hand)
        self.clip = clip
        self.step = steplab.optimize(self.model, loss_of, recipe, optimizer, clip=clip)
        self.optimizer = (by_hand or optimizer)(self.hand)
        self.tapes = TapeGraphs(torch.device("cpu"))
        if captured:
            self.step.parts.graph_warmup = 2
            graph_step(self.step, lambda device: self.tapes)
            self.step.graph.usual = UsualShapes()
            self.step.hooks = HookGuard(self.model, self.step.optimizer, captured=True)
        self.data = torch.Generator().manual_seed(1)

    @property
    def optimizers(self):
        return self.step.optimizer, self.optimizer

    def batch(self, rows=4):
        return torch.randn(rows, 8, generator=self.data)

    def train(self, *rows, micro_batches=1):
        """Train both on the same batches, one step for each number of rows; compare losses."""
        for count in rows or (4,):
            batches = [self.batch(count) for _ in range(micro_batches)]
            seen = self.step(batches)
            self.optimizer.zero_grad()
            losses = []
            for batch in batches:
                loss = loss_of(self.hand, batch)
                (loss / len(batches)).backward()
                losses.append(loss.detach())
            if self.clip:
                nn.utils.clip_grad_norm_(self.hand.parameters(), self.clip)
            self.optimizer.step()
            assert torch.equal(seen.loss, torch.stack(losses).mean())

    def assert_equal(self):
        ours, theirs = self.model.state_dict(), self.hand.state_dict()
        assert list(ours) == list(theirs)
        for name, expected in theirs.items():
            assert torch.equal(ours[name], expected), name


def assign_floats(optimizer):
    def set_rate(number):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (number + 1)

    return set_rate


def use(make):
    def scheduled(optimizer):
        scheduler = make(optimizer)
        return lambda number: scheduler.step() if number else None

    return scheduled


SCHEDULES = {
    "float": assign_floats,
    "lambda": use(lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1))),
    "cosine": use(lambda o: lr_scheduler.CosineAnnealingLR(o, 20)),
    "one cycle": use(lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20)),
    "chain": use(
        lambda o: lr_scheduler.SequentialLR(
            o,
            [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)],
            [4],
        )
    ),
}


@pytest.mark.filterwarnings("ignore:.*has changed, which the CUDA graph")
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("recipe", "optimizer", "by_hand"),
    [("plain", sgd, sgd), ("optimizer=one-pass", adamw, one_pass)],
    ids=["sgd", "one-pass"],
)
def test_schedules_reach_the_update_to_the_bit(recipe, optimizer, by_hand, schedule, captured):
    twins = Twins(recipe, optimizer, by_hand, captured, clip=0.5 if recipe == "plain" else 0.0)
    schedules = [SCHEDULES[schedule](optimizer) for optimizer in twins.optimizers]
    for number in range(9):
        for set_rate in schedules:
            set_rate(number)
        assert [float(group["lr"]) for group in twins.optimizers[0].param_groups] == [
            float(group["lr"]) for group in twins.optimizers[1].param_groups
        ]
        twins.train()
    twins.assert_equal()
    if captured:
        # One cycle changes betas too: the graph is captured once more, without the update.
        assert twins.tapes.captures == 1 + (schedule == "one cycle" and recipe != "plain")
        assert twins.tapes.replays >= 4


@pytest.mark.parametrize(
    ("key", "value"), [("weight_decay", 0.5), ("betas", (0.5, 0.9)), ("eps", 1e-3)]
)
def test_other_numbers_that_change_take_the_update_out_of_the_graph(key, value):
    twins = Twins("optimizer=one-pass", adamw, one_pass, captured=True)
    twins.train(4, 4, 4, 4)
    assert twins.step.graph.has_update
    for optimizer in twins.optimizers:
        optimizer.param_groups[0][key] = value
    with pytest.warns(UserWarning, match=rf"{key} of parameter group 0 has changed"):
        twins.train()
    twins.train(4, 4, 4, 4)
    twins.assert_equal()
    assert twins.tapes.captures == 2 and not twins.step.graph.has_update
    for number in range(3):
        for optimizer in twins.optimizers:
            optimizer.param_groups[0][key] = value if number else 0.0 if key != "betas" else value
        twins.train()
    assert twins.tapes.captures == 2, "from now on it may change at every step"
    twins.assert_equal()


def test_a_scheduler_goes_with_a_compiled_update_and_does_not_recompile_it():
    step = steplab.optimize(Net(), loss_of, f"{COMPILED},compile.optimizer=true", adamw)
    scheduler = lr_scheduler.StepLR(step.optimizer, 1, 0.5)
    compiled = []
    for _ in range(5):
        step([torch.randn(4, 8)])
        scheduler.step()
        compiled.append(graph_count())
    assert compiled[1] == compiled[-1]
    assert step.optimizer.param_groups[0]["lr"] == 1e-2 / 32


def test_a_compiled_update_is_compiled_no_more_once_its_numbers_change():
    torch.manual_seed(0)
    recipe = f"{COMPILED},compile.optimizer=true"
    hand, batch = Net(), torch.randn(4, 8)
    step, theirs = steplab.optimize(copy.deepcopy(hand), loss_of, recipe, sgd), sgd(hand)
    schedules = [lr_scheduler.OneCycleLR(o, 0.01, total_steps=9) for o in (step.optimizer, theirs)]
    told, compiled = [], []
    for _ in range(6):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step([batch])
        told += [str(w.message) for w in caught if "compiled anew" in str(w.message)]
        compiled.append(graph_count())
        theirs.zero_grad()
        loss_of(hand, batch).backward()
        theirs.step()
        for schedule in schedules:
            schedule.step()
    assert compiled[0] == compiled[-1]
    assert told == [
        "momentum of parameter group 0 has changed, for which the update would be compiled anew: "
        "from now on it runs as it is written."
    ]
    for ours, expected in zip(step.model.parameters(), hand.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("recipe", ["plain", COMPILED])
@pytest.mark.parametrize("captured", [False, True])
def test_a_smaller_last_batch_runs_outside_the_graph(recipe, captured):
    twins = Twins(recipe, captured=captured)
    twins.train(4, 4, 4, 4, 3, 4, 4, 2, 4)
    twins.assert_equal()
    assert twins.tapes.captures == captured and twins.tapes.replays == 5 * captured


def test_a_small_first_batch_is_not_what_is_captured_and_a_lasting_change_is_captured_again():
    twins = Twins("plain", captured=True)
    twins.train(3, *[4] * (OTHERS_IN_A_ROW + 4))
    assert (twins.tapes.captures, twins.tapes.replays) == (1, 3)
    twins.train(*[6] * (OTHERS_IN_A_ROW + 4))
    assert (twins.tapes.captures, twins.tapes.replays) == (2, 6)
    twins.assert_equal()


def test_a_loop_whose_batches_are_never_of_one_shape_is_told_once():
    """And none of its shapes is compiled: none comes often enough in a row."""
    twins = Twins(COMPILED, captured=True)
    graphs = graph_count()
    with pytest.warns(UserWarning, match="20 of 21 steps had batches of changing shapes") as seen:
        twins.train(4, *[3, 5] * 30)
    assert len(seen) == 1 and not twins.tapes.captures
    assert graph_count() - graphs <= 2  # of the first step, whose second block needs gradients
    twins.assert_equal()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Twins(COMPILED, captured=True).train(*[4, 4, 4, 4, 3] * 25)


@pytest.mark.parametrize("captured", [False, True])
def test_micro_batches_add_up_and_their_number_may_vary(captured):
    twins = Twins("plain", captured=captured, clip=0.1)
    for count in (2, 2, 2, 2, 3, 1, 2):
        twins.train(micro_batches=count)
    twins.assert_equal()
    assert twins.tapes.captures == captured


@pytest.mark.parametrize("recipe", ["plain", COMPILED])
@pytest.mark.parametrize("captured", [False, True])
def test_evaluation_in_between(recipe, captured):
    twins = Twins(recipe, captured=captured)
    held_out = torch.randn(5, 8)
    for _ in range(2):
        twins.train(4, 4, 4, 4)
        values = []
        for model in (twins.model, twins.hand):
            model.eval()
            with torch.no_grad():
                values.append(loss_of(model, held_out))
            model.train()
        assert torch.equal(*values)
    twins.train(4, 4)
    twins.assert_equal()


@pytest.mark.parametrize("compiled", ["", ",compile=whole,compile.backend=eager", "," + COMPILED])
def test_evaluation_where_weights_are_rounded(compiled):
    torch.manual_seed(0)
    evaluated = nn.Sequential(Net(), nn.Linear(8, 8))
    undisturbed = copy.deepcopy(evaluated)
    recipe = "precision=bf16-weights,optimizer=one-pass" + compiled
    steps = [steplab.optimize(m, loss_of, recipe, adamw) for m in (evaluated, undisturbed)]
    held_out, batch = torch.randn(5, 8), torch.randn(4, 8)
    for _ in range(2):
        evaluated.eval()
        with torch.no_grad():
            seen = evaluated(held_out)
            with torch.autocast("cpu", torch.bfloat16):
                expected = evaluated(held_out)
        evaluated.train()
        assert (seen.dtype, expected.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(seen, expected.float())
        assert len({step([batch]).loss.item() for step in steps}) == 1
    for name, weight in undisturbed.state_dict().items():
        assert torch.equal(evaluated.state_dict()[name], weight), name


def test_evaluation_with_full_weights_is_the_plain_models():
    model = Net()
    step = steplab.optimize(model, loss_of, "precision=bf16-weights,optimizer=one-pass", adamw)
    step([torch.randn(4, 8)])
    plain, held_out = Net(), torch.randn(5, 8)
    plain.load_state_dict(model.state_dict())
    for one in (model, plain):
        one.eval()
    with step.full_weights():
        average = copy.deepcopy(model)
        assert torch.equal(model(held_out), plain(held_out))
    nn.init.zeros_(model.blocks[0].linear.weight)
    assert torch.equal(average(held_out), plain(held_out))  # not by the forward of the model
    assert list(inspect.signature(model.forward).parameters) == ["x"]


def test_layers_that_were_in_eval_mode_before_stay_there():
    hand = Net()
    hand.norm.eval()  # a frozen norm, as in a pretrained backbone
    model = copy.deepcopy(hand)
    step = steplab.optimize(model, loss_of, "plain", sgd)
    assert not model.norm.training and model.blocks[0].training
    batch = torch.randn(4, 8)
    assert torch.equal(step([batch]).loss, loss_of(hand, batch))
    assert steplab.optimize(Net().eval(), loss_of, "plain", sgd).model.norm.training
    trained = Net()
    assert not steplab.optimize(trained, loss_of, "plain", mode="infer").model.norm.training


def test_what_is_replaced_by_assignment_is_captured_again():
    twins = Twins("plain", captured=True)
    twins.train(4, 4, 4, 4)
    for model in (twins.model, twins.hand):
        model.norm.running_mean = torch.ones(8)
    twins.train(4, 4, 4, 4)
    twins.assert_equal()
    assert twins.tapes.captures == 2
    for model in (twins.model, twins.hand):
        model.blocks[1] = model.blocks[0]  # shared from now on
    twins.train(4, 4, 4, 4)
    twins.assert_equal()
    assert twins.tapes.captures == 3


def of_norm(make):
    """An optimizer of the norm's parameters alone; all others are frozen."""

    def made(model, **how):
        model.blocks.requires_grad_(False)
        return make(model.norm, **how)

    return made


@pytest.mark.parametrize(
    ("recipe", "optimizer", "by_hand"),
    [("plain", sgd, sgd), ("optimizer=one-pass", adamw, one_pass)],
    ids=["sgd", "one-pass"],
)
def test_a_group_of_parameters_that_is_added_later_is_trained_too(recipe, optimizer, by_hand):
    twins = Twins(recipe, of_norm(optimizer), of_norm(by_hand), captured=True)
    before = copy.deepcopy(twins.model.blocks[0].linear.weight)
    twins.train(4, 4, 4, 4)
    for model, one in zip((twins.model, twins.hand), twins.optimizers, strict=True):
        model.blocks.requires_grad_(True)
        one.add_param_group({"params": list(model.blocks.parameters()), "lr": 0.125})
    twins.train(4, 4, 4, 4)
    twins.assert_equal()
    assert twins.tapes.captures == 2
    assert not torch.equal(twins.model.blocks[0].linear.weight, before)


def test_a_later_group_of_a_captured_optimizer_counts_its_steps_on_the_device():
    twins = Twins("plain", of_norm(adamw), captured=True)
    twins.step.optimizer.add_param_group({"params": list(twins.model.blocks.parameters())})
    assert twins.step.optimizer.param_groups[1]["capturable"]


def test_layers_that_are_frozen_or_put_into_eval_mode_are_captured_again():
    twins = Twins("plain", captured=True)
    twins.train(4, 4, 4, 4)
    for model in (twins.model, twins.hand):
        model.norm.eval()
        model.blocks[0].requires_grad_(False)
    twins.train(4, 4, 4, 4)
    twins.assert_equal()
    assert twins.tapes.captures == 2


@pytest.mark.parametrize("captured", [False, True])
def test_an_average_of_the_weights_that_is_exchanged_for_evaluation(captured):
    twins = Twins("plain", captured=captured)
    averages = [[p.detach().clone() for p in m.parameters()] for m in (twins.model, twins.hand)]
    held_out, values = torch.randn(5, 8), []
    for _ in range(6):
        twins.train()
        for model, average in zip((twins.model, twins.hand), averages, strict=True):
            for mean, p in zip(average, model.parameters(), strict=True):
                mean.lerp_(p.detach(), 0.1)
                p.data, mean.data = mean.data, p.data
            values.append(loss_of(model.eval(), held_out))
            model.train()
            for mean, p in zip(average, model.parameters(), strict=True):
                p.data, mean.data = mean.data, p.data
    assert values[::2] == values[1::2]
    twins.assert_equal()
    for ours, theirs in zip(*averages, strict=True):
        assert torch.equal(ours, theirs)
    assert twins.tapes.captures == captured


def test_weights_that_stay_exchanged_are_captured_again():
    twins = Twins("plain", captured=True)
    twins.train(4, 4, 4, 4)
    for model in (twins.model, twins.hand):
        for p in model.parameters():
            p.data = p.data * 0.5
    twins.train(4, 4, 4, 4)
    twins.assert_equal()
    assert twins.tapes.captures == 2


def test_full_weights_for_an_average_where_the_recipe_rounds_them():
    step = steplab.optimize(Net(), loss_of, "precision=bf16-weights,optimizer=one-pass", adamw)
    weight = step.model.blocks[0].linear.weight
    with step.full_weights():
        average = weight.detach().clone()
    for _ in range(5):
        step([torch.randn(4, 8)])
        with step.full_weights():
            average.lerp_(weight.detach(), 0.001)
            assert weight.dtype == torch.float32
    assert weight.dtype == torch.bfloat16
    assert not torch.equal(average, average.bfloat16().float())


ROUNDED = "precision=bf16-weights,optimizer=one-pass"


def clamp(model):
    with torch.no_grad():
        for weight in model.parameters():
            weight.clamp_(-0.01, 0.01)


def clamp_data(model):
    for weight in model.parameters():
        weight.data.clamp_(-0.01, 0.01)


def initialize(model):
    nn.init.constant_(model.blocks[0].linear.weight, 0.005)


def load_a_part(model):
    torch.manual_seed(5)
    model.blocks[0].load_state_dict(Block().state_dict())


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("change", [clamp, clamp_data, initialize, load_a_part])
def test_what_a_loop_writes_into_weights_that_are_rounded_is_kept(change, captured):
    """The step before and after are the same as with weights of fp32, but for their rounding."""
    torch.manual_seed(0)
    rounded = Twins(ROUNDED, adamw, captured=captured)
    plain = steplab.optimize(Net(), loss_of, "plain", adamw)
    plain.model.load_state_dict(rounded.model.state_dict())
    for batch in torch.randn(5, 4, 8):
        for step in (rounded.step, plain):
            step([batch])
            change(step.model)
    for name, expected in plain.model.state_dict().items():
        found = rounded.model.state_dict()[name]
        assert found.dtype == expected.dtype
        # A bf16 forward moves AdamW's first steps by less than the steps themselves, 0.01 each.
        assert torch.allclose(found, expected, atol=0.02, rtol=0.02), name


def test_untouched_weights_keep_their_fp32_where_others_are_changed():
    torch.manual_seed(0)
    model = Net()
    step = steplab.optimize(model, loss_of, ROUNDED, adamw)
    step([torch.randn(4, 8)])
    before = model.state_dict()["blocks.0.linear.weight"].clone()
    with torch.no_grad():
        model.blocks[0].linear.weight[0, 0] = 3.0
    after = model.state_dict()["blocks.0.linear.weight"]
    assert after[0, 0] == 3.0 and torch.equal(after.flatten()[1:], before.flatten()[1:])
    assert not torch.equal(after, after.bfloat16().float())


def test_parts_of_a_model_have_state_dicts_of_full_weights():
    torch.manual_seed(0)
    model = Net()
    step = steplab.optimize(model, loss_of, ROUNDED, adamw)
    step([torch.randn(4, 8)])
    part, whole = model.blocks[0].state_dict(), model.state_dict()
    for name, weight in part.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, whole[f"blocks.0.{name}"])
    model.blocks[1].load_state_dict(part)
    for name, weight in part.items():
        assert torch.equal(model.state_dict()[f"blocks.1.{name}"], weight)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.blocks[1].load_state_dict({**part, "more": torch.ones(1)})
    assert model.blocks[1].linear.weight.dtype == torch.bfloat16  # as before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_is_whole_or_refused(copied):
    """Of 16-bit weights a copy would have nothing else, which an average of them needs."""
    torch.manual_seed(0)
    plain = steplab.optimize(Net(), loss_of, "plain", adamw)
    plain([torch.randn(4, 8)])
    twin = copied(plain.model)
    assert torch.equal(twin.norm.weight, plain.model.norm.weight) and twin.state_dict()
    step = steplab.optimize(Net(), loss_of, ROUNDED, adamw)
    step([torch.randn(4, 8)])
    with pytest.raises(UserError, match=r"step\.full_weights\(\)"):
        copied(step.model)
    with step.full_weights():
        twin = copied(step.model)
    for name, weight in step.model.state_dict().items():
        assert torch.equal(twin.state_dict()[name], weight), name


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_gradients_can_be_logged_after_the_step(captured, clip):
    twins = Twins("plain", captured=captured, clip=clip)
    for rows in (4, 4, 4, 4, 3, 4):
        twins.train(rows)
        for ours, theirs in zip(twins.model.parameters(), twins.hand.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        if rows == 3:
            twins.step.optimizer.zero_grad()  # by habit: nothing depends on it


def test_a_gradient_scaler_is_the_steps_own():
    torch.manual_seed(0)
    hand = Net()
    step = steplab.optimize(copy.deepcopy(hand), loss_of, "precision=fp16", sgd, clip=0.5)
    optimizer, scaler = sgd(hand), torch.amp.GradScaler("cpu")
    for number in range(6):
        batch = torch.randn(4, 8) * (1e6 if number == 2 else 1)  # an overflow: both skip it
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(hand, batch)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(hand.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(step([batch]).loss, loss.detach()) or not loss.isfinite()
    assert step.parts.scaler.state_dict() == scaler.state_dict()
    for ours, theirs in zip(step.model.parameters(), hand.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    step.parts.graph_warmup = 1
    with pytest.raises(Unsupported, match=r"gradient scaler decides.*leave the graph out"):
        graph_step(step, TapeGraphs)


@pytest.mark.parametrize("recipe", ["plain", COMPILED])
def test_hooks_run_where_python_runs(recipe):
    twins, seen = Twins(recipe), []
    block = twins.model.blocks[0]
    block.register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    block.linear.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    twins.train(4, 4)
    assert len(seen) == 4


def test_hooks_that_would_not_run_are_refused():
    twins = Twins(COMPILED)
    twins.train()
    handle = twins.model.blocks[1].register_forward_hook(lambda *_: None)
    with pytest.raises(Unsupported, match=r"blocks\.1 has a forward hook that was registered aft"):
        twins.train()
    handle.remove()
    twins.model.blocks[1].linear.weight.register_hook(lambda grad: grad)  # autograd calls it
    twins.train()

    twins = Twins("plain", captured=True)
    handle = twins.model.norm.register_full_backward_hook(lambda *_: None)
    with pytest.raises(Unsupported, match=r"norm has a backward hook.*cuda_graph=off"):
        twins.train()
    handle.remove()
    twins.train(4, 4, 4, 4)
    twins.model.norm.weight.register_hook(lambda grad: grad)
    with pytest.raises(Unsupported, match=r"parameter norm\.weight has a hook"):
        twins.train()
    twins = Twins("plain", captured=True)
    twins.step.optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(Unsupported, match="the optimizer has a hook"):
        twins.train()


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    "recipe",
    ["optimizer=foreach", "optimizer=one-pass", "precision=bf16-weights,optimizer=one-pass"],
)
def test_checkpoints_fit_with_and_without_the_recipe(recipe, captured, tmp_path):
    captured = captured and recipe != "optimizer=foreach"  # torch captures it on a GPU only
    torch.manual_seed(0)
    whole = Twins(recipe, adamw, captured=captured)
    data = [torch.randn(4, 8) for _ in range(8)]
    for batch in data[:4]:
        whole.step([batch])
    saved = {"model": whole.model.state_dict(), "optimizer": whole.step.optimizer.state_dict()}
    torch.save(saved, tmp_path / "checkpoint.pt")
    names = list(Net().state_dict())
    assert list(saved["model"]) == names
    assert {x.dtype for x in saved["model"].values()} == {torch.float32, torch.int64}
    for batch in data[4:]:
        whole.step([batch])

    loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    again = Twins(recipe, adamw, captured=captured)
    for batch in data[:4] if captured else ():
        again.step([batch * 2])  # a graph with other weights and another state
    again.model.load_state_dict(loaded["model"])
    again.step.optimizer.load_state_dict(loaded["optimizer"])
    for batch in data[4:]:
        again.step([batch])
    for name, expected in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], expected), name

    loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)  # torch trains in the old
    plain = Net()  # the script as it was before steplab
    optimizer = adamw(plain)
    plain.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    for batch in data[4:]:
        optimizer.zero_grad()
        loss_of(plain, batch).backward()
        optimizer.step()
    back = steplab.optimize(Net(), loss_of, recipe, adamw)
    back.model.load_state_dict(plain.state_dict())
    back.optimizer.load_state_dict(optimizer.state_dict())
    back([data[0]])
    if recipe.startswith("optimizer"):
        for ours, theirs in zip(whole.model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_bare_batch_and_gradients_that_are_off_are_refused():
    step = steplab.optimize(Net(), loss_of, "plain", sgd)
    with torch.no_grad(), pytest.raises(UserError, match="gradients are turned off"):
        step([torch.randn(4, 8)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step([torch.randn(4, 8)])
