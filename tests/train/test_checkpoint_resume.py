import random

import numpy as np
import pytest

pytest.importorskip("safetensors")
import torch

from steplab.core.codec import encode
from steplab.core.errors import Unsupported
from steplab.train.checkpoint import (
    load_weights,
    read_progress,
    restore_checkpoint,
    save_checkpoint,
)
from steplab.train.checkpoint_files import TrainProgress, newest_checkpoint
from steplab.workloads.gpt.config import GPTConfig
from steplab.workloads.gpt.model import GPT
from tests.train.small_training import IMPLEMENTATIONS, Net, Training, adamw, same

PROGRESS = TrainProgress(10, {"epoch": 1, "window": [3, 4]}, {"lr": 0.01}, {"loss": 1.5})


def seed_all(seed: int = 7) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    # Leaves a second gaussian waiting in each.
    random.gauss(0, 1)
    np.random.randn()


def resumed(folder, impl: str, scaled: bool, device: str = "cpu") -> tuple[Training, Training]:
    """Return 20 steps in one go, and 10 + save + fresh objects + restore + 10."""
    whole, first, second = (Training(impl, scaled, device) for _ in range(3))
    start = {k: v.clone() for k, v in whole.model.state_dict().items()}
    first.model.load_state_dict(start)
    seed_all()
    losses = whole.run(0, 20)
    gauss = (random.gauss(0, 1), np.random.randn(), torch.rand(()))
    seed_all()
    assert losses[:10] == first.run(0, 10)
    save_checkpoint(folder, *first.parts, PROGRESS, keep=2)
    seed_all(99)
    progress = restore_checkpoint(newest_checkpoint(folder), *second.parts)
    assert progress.step == 10 and progress.position == PROGRESS.position
    assert losses[10:] == second.run(10, 20)
    assert gauss == (random.gauss(0, 1), np.random.randn(), torch.rand(()))
    return whole, second


@pytest.mark.parametrize("scaled", [False, True], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_break_changes_no_bit(tmp_path, impl, scaled):
    whole, second = resumed(tmp_path, impl, scaled)
    assert same(whole.content(), second.content())
    assert whole.scaler.state_dict() == second.scaler.state_dict()
    if scaled:
        assert whole.scaler.get_scale() != 2.0**18  # it has moved, so its state matters


@pytest.mark.gpu
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_break_changes_no_bit_on_a_gpu(tmp_path, impl):
    whole, second = resumed(tmp_path, impl, scaled=True, device="cuda")
    assert same(whole.content(), second.content())


def test_restoring_over_a_training_that_went_on(tmp_path):
    training = Training()
    training.run(0, 3)
    save_checkpoint(tmp_path, *training.parts, PROGRESS, keep=0)
    before = training.content()
    training.run(3, 6)
    restore_checkpoint(tmp_path, *training.parts)
    assert same(before, training.content())


def test_restored_state_shares_no_memory_with_the_file(tmp_path):
    training = Training()
    training.run(0, 3)
    path = save_checkpoint(tmp_path, *training.parts, PROGRESS, keep=0)
    restore_checkpoint(path, *training.parts)
    before = training.content()
    for file in path.iterdir():
        file.write_bytes(b"\xff" * file.stat().st_size)
    assert same(before, training.content())


def test_shared_tensors_are_saved_once_and_stay_shared(tmp_path):
    training, other = Training(), Training()
    training.run(0, 2)
    path = save_checkpoint(tmp_path, *training.parts, PROGRESS, keep=0)
    from safetensors.torch import load_file

    assert "embedding.weight" in load_file(path / "model.safetensors")
    assert "head.weight" not in load_file(path / "model.safetensors")
    assert "exp_avg/embedding.weight" in load_file(path / "optimizer.safetensors")
    restore_checkpoint(path, *other.parts)
    assert other.model.head.weight is other.model.embedding.weight
    assert same(training.content(), other.content())


def test_another_order_of_modules_and_parameters_cannot_mix_up_the_state(tmp_path):
    training = Training()
    training.run(0, 4)
    path = save_checkpoint(tmp_path, *training.parts, PROGRESS, keep=0)
    other = Training()
    other.model = Net(head_first=True)
    other.optimizer = adamw(other.model)
    for group in other.optimizer.param_groups:
        group["params"].reverse()
    restore_checkpoint(path, *other.parts)
    weight, moments = other.model.body[0].weight, other.optimizer.state
    own = training.model.body[0].weight
    assert torch.equal(weight, own)
    assert torch.equal(moments[weight]["exp_avg"], training.optimizer.state[own]["exp_avg"])


def test_the_update_runs_as_it_was_built_and_settings_come_back(tmp_path):
    training, other = Training("foreach"), Training("fused")
    training.run(0, 4)
    restore_checkpoint(save_checkpoint(tmp_path, *training.parts, PROGRESS, keep=0), *other.parts)
    groups = other.optimizer.param_groups
    assert [g["fused"] for g in groups] == [True, True]
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    assert [g["betas"] for g in groups] == [(0.9, 0.999), (0.8, 0.95)]
    assert [g["lr"] for g in groups] == [1e-2 / 4] * 2
    other.run(4, 6)


def test_a_learning_rate_in_a_tensor_stays_the_same_tensor(tmp_path):
    model = Net()
    one, other = (
        torch.optim.AdamW(model.parameters(), lr=torch.tensor(lr), foreach=False)
        for lr in (0.3, 0.1)
    )
    scaler, rate = torch.amp.GradScaler("cpu", enabled=False), other.param_groups[0]["lr"]
    restore_checkpoint(
        save_checkpoint(tmp_path, model, one, scaler, PROGRESS, keep=0), model, other, scaler
    )
    assert other.param_groups[0]["lr"] is rate and torch.equal(rate, torch.tensor(0.3))


class Counting(torch.optim.Optimizer):
    """Keeps a plain number per parameter, as many optimizers outside torch do."""

    def __init__(self, parameters, state=0):
        super().__init__(parameters, {"lr": 0.1})
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"step": state, "mean": torch.zeros(2, dtype=torch.bfloat16)}


def test_state_that_is_no_tensor(tmp_path):
    model, scaler = Net(), torch.amp.GradScaler("cpu", enabled=False)
    one, other = Counting(model.parameters(), 5), Counting(model.parameters())
    restore_checkpoint(
        save_checkpoint(tmp_path, model, one, scaler, PROGRESS, keep=0), model, other, scaler
    )
    for state in other.state.values():
        assert state["step"] == 5 and state["mean"].dtype == torch.bfloat16
    with pytest.raises(Unsupported, match="cannot hold the optimizer's step, a set"):
        save_checkpoint(
            tmp_path, model, Counting(model.parameters(), {1}), scaler, PROGRESS, keep=0
        )
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000010"]


def test_weights_alone_into_a_gpt(tmp_path):
    config = GPTConfig(32, 64, layers=2, heads=2, context=16, vocab_size=64)
    one, other = GPT(config), GPT(config)
    optimizer = torch.optim.AdamW(one.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    progress = TrainProgress(0, {}, encode(config))
    load_weights(save_checkpoint(tmp_path, one, optimizer, scaler, progress, keep=0), other)
    tokens_BT = torch.arange(16).reshape(1, 16)
    assert torch.equal(one(tokens_BT), other(tokens_BT))
    assert read_progress(tmp_path).spec == encode(config)


def test_progress_says_who_wrote_it_and_keeps_odd_numbers(tmp_path):
    training = Training()
    progress = TrainProgress(3, {}, {}, {"loss": float("nan"), "best": float("inf")})
    save_checkpoint(tmp_path, *training.parts, progress, keep=0)
    read = read_progress(tmp_path)
    assert read.torch == str(torch.__version__) and read.steplab and read.created
    assert np.isnan(read.metrics["loss"]) and read.metrics["best"] == float("inf")


def test_an_optimizer_of_another_model_is_refused(tmp_path):
    training = Training()
    training.optimizer = adamw(Net())
    with pytest.raises(Unsupported, match="not a parameter of the model"):
        save_checkpoint(tmp_path, *training.parts, PROGRESS, keep=0)
