import pytest
import torch

from steplab.core import TrainSettings
from steplab.core.errors import UserError
from steplab.train.loop import learning_rate, set_learning_rate


def test_warm_up_then_cosine():
    settings = TrainSettings(steps_per_epoch=100, lr=1e-3, min_lr=1e-4, warmup_steps=10)
    rates = [learning_rate(settings, step) for step in range(1, 101)]
    assert rates[0] == pytest.approx(1e-4) and rates[9] == pytest.approx(1e-3)
    assert rates[:10] == sorted(rates[:10]) and rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[54] == pytest.approx((1e-3 + 1e-4) / 2)
    assert rates[-1] == pytest.approx(1e-4)
    assert learning_rate(settings, 500) == pytest.approx(1e-4)


def test_warm_up_is_a_twentieth_by_default():
    settings = TrainSettings(steps_per_epoch=200, lr=1.0, min_lr=0.0)
    assert learning_rate(settings, 10) == 1.0 and learning_rate(settings, 5) == 0.5


def test_no_warm_up_at_all():
    settings = TrainSettings(steps_per_epoch=10, lr=1.0, min_lr=0.0, warmup_steps=0)
    assert learning_rate(settings, 1) > 0.9


def test_rates_reach_floats_and_tensors():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    set_learning_rate(optimizer, 0.5)
    assert optimizer.param_groups[0]["lr"] == 0.5
    tensor = optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    set_learning_rate(optimizer, 0.25)
    assert tensor.item() == 0.25


@pytest.mark.parametrize(
    "changes", [{"batch_size": 0}, {"lr": 0.0}, {"min_lr": 1.0}, {"keep_last": -1}, {"epochs": 0}]
)
def test_impossible_settings(changes):
    with pytest.raises(UserError):
        TrainSettings(**changes)
