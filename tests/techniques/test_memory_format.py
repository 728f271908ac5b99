"""channels_last: the same numbers from weights that are laid out otherwise."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from steplab.core import Ran, RunSpec
from steplab.core.errors import Unsupported
from steplab.techniques.context import StepContext
from steplab.techniques.memory_format import TECHNIQUE
from steplab.techniques.recipes import parse_recipe
from steplab.techniques.technique import StepParts
from tests.compare.sides import run_of

LAST = {"layout": "channels_last"}


def parts_of(model: nn.Module) -> StepParts:
    return StepParts(model, torch.device("cpu"), torch.amp.GradScaler("cpu", enabled=False))


def convnet() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 4, 3)
    return nn.Sequential(*layers, nn.Conv2d(4, 4, 1), nn.Flatten(), nn.LazyLinear(5))


def test_it_computes_the_same_with_the_same_names():
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    plain, last = convnet().double(), convnet().double()
    plain(x), last(x)  # the lazy layer
    last.load_state_dict(plain.state_dict())
    TECHNIQUE.apply(parts_of(last), LAST)
    assert last[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert [*last.state_dict()] == [*plain.state_dict()]
    outputs = [model(x) for model in (plain, last)]
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-12, atol=1e-12)
    for one, other in zip(plain.parameters(), last.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-10)


def test_volumes_are_laid_out_too():
    model = nn.Sequential(nn.Conv3d(2, 4, 3))
    TECHNIQUE.apply(parts_of(model), LAST)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last_3d)


def test_a_model_without_images_is_refused():
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Linear(4, 4))
    with pytest.raises(Unsupported, match="no Conv2d or Conv3d"):
        TECHNIQUE.apply(parts_of(model), LAST)


def test_a_convolution_in_another_layout_is_a_mismatch():
    run = replace(run_of([1.0]), ran=Ran(conv_layouts={"channels_last": 2, "contiguous": 1}))
    assert "1 of 3 convolutions" in TECHNIQUE.mismatch(LAST, run)
    assert not TECHNIQUE.mismatch(LAST, replace(run, ran=Ran(conv_layouts={"channels_last": 3})))
    assert "unverified" in TECHNIQUE.unverified(LAST, replace(run, ran=Ran()))


def test_it_is_suggested_where_most_products_are_convolutions():
    def suggested(convolutions: int, products: int) -> bool:
        layouts = {"contiguous": convolutions}
        ran = Ran(conv_layouts=layouts, matmul_dtypes={"float": products})
        return bool(TECHNIQUE.suggest(StepContext(replace(run_of([1.0]), ran=ran)), {}))

    assert suggested(15, 3)  # a ResNet
    assert not suggested(1, 80)  # the patches of a vision transformer
    assert not suggested(0, 80)


def test_layouts_are_seen_in_a_trace(tmp_path):
    pytest.importorskip("torch", minversion="2.13", reason="its profiler tells strides")
    from steplab.step.trial import trial
    from steplab.workloads.user_model import load_user_model

    file = tmp_path / "images.py"
    file.write_text(
        "import torch, steplab\n"
        "from torch import nn\n"
        "def make():\n"
        "    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))\n"
        "    batches = lambda size: [torch.ones(size, 3, 9, 9)]\n"
        "    return steplab.UserModel(net, batches, lambda m, x: m(x).square().mean())\n"
    )
    name = f"{file}:make"
    load_user_model(name)
    spec = RunSpec(name, {}, batch=2, mode="full", steps=1, warmup=0)
    assert trial(spec).ran.conv_layouts == {"contiguous": 2}
    last = trial(replace(spec, recipe=parse_recipe("memory_format=channels_last")))
    assert last.status == "ok" and last.ran.conv_layouts == {"channels_last": 2}
