"""What people hand in by mistake: each sentence says what was found and ends with what to write."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import steplab
from steplab.core import RunSpec
from steplab.core.errors import Unsupported, UserError
from steplab.step.assemble import assemble, micro_batches
from steplab.techniques.recipes import parse_recipe
from steplab.workloads.user_model import UserWorkload

DATA = TensorDataset(torch.ones(10, 4), torch.zeros(10, dtype=torch.long))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def batches(size):
    return DataLoader(DATA, batch_size=size)


def adamw(model, **how):
    return torch.optim.AdamW(model.parameters(), **how)


def run_one_step(factory, mode="full", recipe="plain", batch=2):
    spec = RunSpec("mine.py:make", batch=batch, mode=mode, recipe=parse_recipe(recipe))
    step = assemble(spec, UserWorkload(factory, {}, "mine.py:make"))
    return step(next(micro_batches(step, spec)))


def user_model(**changed):
    """A factory whose UserModel differs from a good one in what is given."""
    good = {"model": Net(), "batches": batches, "loss": loss}
    return lambda: steplab.UserModel(**{**good, **changed})


def test_the_good_one_runs():
    assert torch.isfinite(run_one_step(user_model()).loss)


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (
            lambda: None,
            r"returned nothing, .* End it with: return steplab",
        ),
        (lambda: Net(), r"returned an object of type Net, not a UserModel"),
        (lambda: (Net(), batches, loss), r"returned a tuple of 3"),
        (lambda: {"model": Net()}, r"returned a dict of 1"),
        (lambda: steplab.UserModel, r"returned the class UserModel"),
        (
            lambda: steplab.UserModel(Net(), batches),
            r"got no loss\. Write loss=lambda model",
        ),
        (lambda: steplab.UserModel(Net()), r"got no batches and no loss"),
        (lambda: steplab.UserModel(Net(), loader=batches), r"'loader'.* It takes model, batches"),
        (lambda: steplab.UserModel(Net(), units="images"), r"'units'.* optimizer and unit\."),
    ],
)
def test_what_a_factory_returns(factory, words):
    with pytest.raises(UserError, match=rf"mine\.py:make.*({words})"):
        run_one_step(factory)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model": Net}, r"the class Net, not an nn\.Module\. Call it: model=Net\(\.\.\.\)"),
        ({"model": adamw}, r"the function adamw\(model, \*\*how\), .* Call it: model=adamw"),
        ({"model": [Net(), Net()]}, r"a list of 2, .* Make one module of them"),
        ({"model": "gpt2"}, r"an object of type str, not an nn\.Module"),
        ({"model": batches, "batches": Net()}, r"model and batches are swapped\. Name them"),
        ({"model": loss, "loss": Net()}, r"model and loss are swapped"),
        ({"batches": loss, "loss": batches}, r"batches and loss are swapped"),
        ({"batches": lambda: iter([])}, r"lambda\(\), .* def batches\(size\)"),
        ({"batches": [torch.ones(2, 4)]}, r"a list of 1, .* batches=lambda size: \["),
        (
            {"batches": DataLoader(DATA)},
            r"a DataLoader, whose batch size.*batch_size=size",
        ),
        ({"batches": DATA}, r"the dataset TensorDataset.*DataLoader\(dataset, batch_size=size\)"),
        ({"batches": iter([])}, r"an object of type list_iterator, not a function"),
        ({"batches": None}, r"the batches are None"),
        ({"loss": None}, r"the loss is None, .* Write loss=lambda model, batch"),
        ({"loss": nn.CrossEntropyLoss()}, r"CrossEntropyLoss.* nn\.CrossEntropyLoss\(\)\(model\("),
        ({"loss": nn.CrossEntropyLoss}, r"the class CrossEntropyLoss"),
        ({"loss": F.cross_entropy}, r"cross_entropy\(input.* F\.cross_entropy\(model\(batch"),
        ({"loss": Net()}, r"an object of type Net.* criterion\(model\(batch\[0\]\), batch\[1\]\)"),
        ({"loss": lambda batch: 0}, r"lambda\(batch\), which takes other arguments"),
        ({"loss": lambda model, x, y: 0}, r"lambda\(model, x, y\), which takes other"),
        ({"loss": "mse"}, r"the loss is an object of type str"),
        (
            {"predict": Net()},
            r"the predict is .*type Net, .* predict=lambda model",
        ),
        (
            {"optimizer": adamw(Net())},
            r"type AdamW, but it is made by a function.*optim\.AdamW",
        ),
        ({"optimizer": (adamw(Net()), None)}, r"a tuple of 2, but a step has one optimizer"),
        ({"optimizer": [adamw(Net()), adamw(Net())]}, r"a list of 2, but a step has one"),
        ({"optimizer": torch.optim.AdamW}, r"the class AdamW, not a function optimizer\(model"),
        ({"optimizer": lambda: None}, r"the function lambda\(\), not a function optimizer"),
        ({"tokens_per_sequence": 0}, r"whole number above 0, not 0"),
        ({"optimizer": "adamw"}, r"an object of type str, not a function"),
    ],
)
def test_what_a_user_model_is_made_of(changed, words):
    with pytest.raises(UserError, match=rf"mine\.py:make: .*({words})"):
        run_one_step(user_model(**changed))


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda m, b: None, r"returned None, not a tensor\. End it with: return loss"),
        (lambda m, b: loss(m, b).item(), r"returned an object of type float.* without \.item\(\)"),
        (lambda m, b: (loss(m, b), 1), r"returned a tuple of 2.* steplab\.StepOutput\(loss"),
        (lambda m, b: m(b[0]), r"must be a scalar, but it has shape \(2, 3\)\. Return loss\.mean"),
        (lambda m, b: m(b[0]).sum().to(torch.complex64), r"dtype complex64.* loss\.real"),
        (lambda m, b: m(b[0]).argmax(), r"dtype int64.* Return a float loss"),
        (lambda m, b: loss(m, b).detach(), r"was detached on its way\. Leave out \.detach"),
        (lambda m, b: torch.tensor(1.0), r"was detached on its way"),
        (lambda m, b: SimpleNamespace(loss=None, logits=0), r"there is no loss.* labels=labels"),
        (lambda m, b: {"logits": m(b[0])}, r"a dict of 1, in which there is no loss.* labels="),
        (
            lambda m, b: steplab.StepOutput(loss(m, b), {"acc": 0.5}),
            r"metric 'acc' is .*float",
        ),
        (lambda m, b: steplab.StepOutput(1.0), r"the loss is an object of type float"),
    ],
)
def test_what_a_loss_returns(returned, words):
    with pytest.raises(UserError, match=words):
        run_one_step(user_model(loss=returned))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda loss: SimpleNamespace(loss=loss, logits=None),
        lambda loss: {"loss": loss, "logits": None},
        lambda loss: steplab.StepOutput(loss, {"rows": loss.detach()}),
    ],
)
def test_a_loss_inside_an_output_is_taken_as_it_is(wrap):
    model = Net()
    inner = loss(model, next(iter(batches(2)))).detach()
    found = run_one_step(user_model(model=model, loss=lambda m, b: wrap(loss(m, b))))
    assert torch.equal(found.loss, inner)


def whole_step(model, batch):
    found = loss(model, batch)
    found.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= p.grad
    model.zero_grad()
    return found


@pytest.mark.parametrize("recipe", ["plain", "compile=whole,compile.backend=eager"])
def test_backward_is_the_steps_part(recipe):
    before = torch.Tensor.backward
    with pytest.raises(UserError, match=r"calls backward\(\).*Return the loss"):
        run_one_step(user_model(loss=whole_step), recipe=recipe)
    assert torch.Tensor.backward is before


def test_gradients_inside_the_loss_are_allowed():
    def penalty(model, batch):
        x = batch[0].requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().sum()

    assert torch.isfinite(run_one_step(user_model(loss=penalty)).loss)


def lbfgs(model, **how):
    return torch.optim.LBFGS(model.parameters())


def head_only(model, **how):
    return torch.optim.SGD(model.head.parameters(), 0.1)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lbfgs, r"LBFGS calls the loss several times.* AdamW or SGD"),
        (lambda m, **how: None, r"returned None, not one optimizer\. End it with: return"),
        (lambda m, **how: (adamw(m), adamw(m)), r"returned a tuple of 2.* into one, as groups"),
        (lambda m, **how: {"a": adamw(m)}, r"returned a dict of 1.* Return the optimizer alone"),
        (lambda m, **how: adamw(Net()), r"none of the model's parameters.*lambda model, \*\*how"),
        (head_only, r"2 of 4 trainable parameters are not in the optimizer \(body\.weight, body"),
        (
            lambda params, **how: torch.optim.SGD(params, 0.1),
            r"called as optimizer\(model, ",
        ),
        (functools.partial(torch.optim.SGD, lr=0.1), r"its first argument is the model"),
    ],
)
def test_what_an_optimizer_function_returns(optimizer, words):
    with pytest.raises(UserError, match=rf"mine\.py:make: .*({words})"):
        run_one_step(user_model(optimizer=optimizer))


def test_an_optimizer_without_room_for_what_the_recipe_asks():
    factory = user_model(optimizer=lambda m: torch.optim.AdamW(m.parameters()))
    with pytest.raises(UserError, match=r"lambda\(m\), but the recipe asks for fused=True"):
        run_one_step(factory, recipe="optimizer=fused")


@pytest.mark.parametrize("mode", ["full", "forward+backward"])
def test_a_model_without_anything_to_train(mode):
    with pytest.raises(UserError, match=r"All 4 parameters of the model are frozen"):
        run_one_step(user_model(model=Net().requires_grad_(False)), mode)


def test_a_model_that_keeps_its_layers_in_a_list():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [nn.Linear(4, 3)]

        def forward(self, x):
            return self.layers[0](x)

    with pytest.raises(UserError, match=r"no parameters.* nn\.ModuleList"):
        run_one_step(user_model(model=Hidden()))


def outputs_and_targets(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets)


def test_a_loss_of_outputs_and_targets_is_recognized_by_its_error():
    found = r"'Net' object has no attribute 'flatten' "
    line = r"\(.*test_misuse\.py:\d+ \(outputs_and_targets\)\)\."
    with pytest.raises(UserError, match=rf"{found}{line} It is called as loss\(model, batch\)"):
        run_one_step(user_model(loss=outputs_and_targets))


def test_an_error_of_the_model_keeps_its_own_words():
    class Broken(Net):
        def forward(self, x):
            return self.boddy(x)

    with pytest.raises(AttributeError, match="no attribute 'boddy'"):
        run_one_step(user_model(model=Broken()))


def test_a_batch_elsewhere_and_one_of_doubles():
    step = steplab.optimize(Net(), loss, "plain")
    labels = torch.zeros(2, dtype=torch.long)
    with pytest.raises(UserError, match=r"The batch is on meta, the model on cpu: .*\.to\('cpu'\)"):
        step([(torch.ones(2, 4, device="meta"), labels)])
    with pytest.raises(UserError, match=r"batch is float64, the model float32: .*torch\.float32"):
        step([(torch.ones(2, 4, dtype=torch.float64), labels)])
    with pytest.raises(UserError, match=r"holds numpy arrays: write torch\.from_numpy"):
        step([(np.ones((2, 4)), labels)])
    half = steplab.optimize(Net().half(), loss, "plain")
    with pytest.raises(UserError, match=r"batch is float32, the model float16: .*precision=bf16"):
        half([(torch.ones(2, 4), labels)])


def test_a_loss_of_another_model():
    other = Net()
    factory = user_model(loss=lambda model, batch: loss(other, batch))
    with pytest.raises(UserError, match=r"reached no parameter of the model.* Use the model that"):
        run_one_step(factory)


def test_gradients_that_hooks_have_used_may_be_gone():
    model = Net()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    assert torch.isfinite(run_one_step(user_model(model=model)).loss)


def test_weights_without_values():
    with torch.device("meta"):
        model = Net()
    with pytest.raises(UserError, match=r"meta device and have no values\. Build it outside"):
        run_one_step(user_model(model=model))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_factory_that_asks_for_a_gpu():
    words = r"puts its model on a GPU \(.*test_misuse\.py:\d+ .*\), .* Leave out \.cuda\(\)"
    with pytest.raises(UserError, match=words):
        run_one_step(lambda: steplab.UserModel(Net().cuda(), batches, loss))


def test_an_error_of_a_factory_keeps_its_own_words():
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        run_one_step(lambda: 1 / 0)


def test_a_step_where_gradients_are_off():
    step = steplab.optimize(Net(), loss, "plain")
    with torch.no_grad(), pytest.raises(UserError, match=r"out of torch\.no_grad\(\)"):
        step([next(iter(batches(2)))])


def generator():
    yield


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: steplab.profile(None), r"None, which a call has returned.* without \(\)"),
        (
            lambda: steplab.profile(loss),
            r"loss\(model, batch\), but .*lambda: train_step",
        ),
        (lambda: steplab.profile(Net()), r"type Net, but it is called without arguments"),
        (lambda: steplab.profile(generator), r"generator\(\), a generator or coroutine"),
        (lambda: steplab.profile(len, steps="3"), r"len\(obj, /\), but it is called"),
        (lambda: steplab.profile(print, steps="3"), r"not '3' and 2"),
        (
            lambda: steplab.Meter(Net()).step(torch.ones(9)),
            r"not an object of type Tensor",
        ),
        (lambda: steplab.Meter(Net), r"steplab\.Meter: the model is the class Net.* model=Net\("),
        (lambda: steplab.Meter(adamw(Net())), r"type AdamW, not an nn\.Module"),
        (lambda: steplab.graph(Net, (torch.ones(2),)), r"The module is the class Net"),
        (
            lambda: steplab.optimize("plain", Net(), loss),
            r"recipe is of type function.*optimize\(model, loss, \"",
        ),
        (lambda: steplab.optimize(loss, Net(), "plain"), r"model and loss are swapped"),
    ],
)
def test_what_a_loop_of_ones_own_is_given(call, words):
    with pytest.raises(UserError, match=words):
        call()


class Blend(Net):
    """Mixes its fp32 input with a weight by an operator that autocast leaves alone."""

    def __init__(self):
        super().__init__()
        self.start = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return super().forward(torch.lerp(x, self.start.expand_as(x), 0.5))


def test_weights_that_the_recipe_rounds_are_not_the_users_mistake():
    """The model was to be left in float32, in which it was."""
    recipe = "precision=bf16-weights,optimizer=one-pass"
    with pytest.raises(Unsupported) as raised:
        run_one_step(user_model(model=Blend()), recipe=recipe)
    said = str(raised.value)
    assert "with weights in bfloat16, as the recipe asks, the loss fails" in said
    assert "use precision=bf16," in said and "float32 and let" not in said
    assert torch.isfinite(run_one_step(user_model(model=Blend()), recipe="precision=bf16").loss)


class Spectrum(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.ones(3, dtype=torch.cfloat))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=4))


@pytest.mark.parametrize("impl", ["fused", "adam-8bit"])
def test_an_optimizer_for_real_numbers_refuses_complex_parameters(impl):
    with pytest.raises(Unsupported, match=f"optimizer={impl} takes no complex parameters"):
        run_one_step(user_model(model=Spectrum()), recipe=f"optimizer={impl}")


@pytest.mark.parametrize("impl", ["forloop", "foreach", "one-pass"])
def test_complex_parameters_are_trained(impl):
    assert torch.isfinite(
        run_one_step(user_model(model=Spectrum()), recipe=f"optimizer={impl}").loss
    )
