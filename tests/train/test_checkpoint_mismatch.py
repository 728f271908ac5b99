import pytest

pytest.importorskip("safetensors")
import torch
from torch import nn

from steplab.core.errors import Unsupported, UserError
from steplab.train.checkpoint import load_weights, restore_checkpoint, save_checkpoint
from steplab.train.checkpoint_files import TrainProgress
from tests.train.small_training import Net, Training, adamw, same

PROGRESS = TrainProgress(1, {}, {})


@pytest.fixture
def saved(tmp_path):
    training = Training()
    training.run(0, 2)
    return save_checkpoint(tmp_path, *training.parts, PROGRESS, keep=0)


def changed(width: int = 8, extra: int = 0, lacking: str = "") -> Training:
    training = Training()
    training.model = Net(width)
    for index in range(extra):
        training.model.register_buffer(f"extra_{index}", torch.zeros(1))
    if lacking:
        delattr(training.model, lacking)
    training.optimizer = adamw(training.model)
    return training


@pytest.mark.parametrize(
    ("training", "fault"),
    [
        (lambda: changed(lacking="unused"), "extra: unused"),
        (lambda: changed(extra=1), r"missing: extra_0\)"),
        (lambda: changed(extra=7), r"extra_3, extra_4 and 2 more\)"),
        (lambda: changed(9), r"body.0.bias \(saved \[8\] float32, model \[9\] float32\)"),
    ],
    ids=["extra", "missing", "many", "misshapen"],
)
def test_another_model_is_refused_and_left_alone(saved, training, fault):
    training = training()
    before = training.content()
    for load in (
        lambda: restore_checkpoint(saved, *training.parts),
        lambda: load_weights(saved, training.model),
    ):
        with pytest.raises(UserError, match=f"model.safetensors does not fit .*{fault}"):
            load()
        assert same(before, training.content())


def test_another_dtype_is_not_converted(saved):
    with pytest.raises(
        UserError, match=r"body.0.bias \(saved \[8\] float32, model \[8\] bfloat16\)"
    ):
        load_weights(saved, Net().bfloat16())


def test_a_model_that_shares_no_more(saved):
    model = Net()
    model.head.weight = nn.Parameter(torch.zeros(16, 8))
    with pytest.raises(UserError, match=r"missing: head\.weight"):
        load_weights(saved, model)


def refused(saved, training: Training, message: str) -> None:
    before = training.content()
    with pytest.raises(UserError, match=message):
        restore_checkpoint(saved, *training.parts)
    assert same(before, training.content())


def test_another_optimizer(saved):
    training = Training()
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    refused(saved, training, "holds the state of AdamW, but this training uses SGD")


def test_other_parameters_in_the_optimizer(saved):
    training = Training()
    training.optimizer.param_groups[1]["params"].pop()
    refused(saved, training, r"other parameters: body.2.bias")
    training.optimizer = torch.optim.AdamW(training.model.parameters())
    refused(saved, training, "in groups of different settings, but this training has them in one")


def test_another_precision(saved, tmp_path):
    scaled = Training(scaled=True)
    refused(saved, scaled, "saved without gradient scaling, but this training does scale")
    path = save_checkpoint(tmp_path / "scaled", *scaled.parts, PROGRESS, keep=0)
    refused(path, Training(), "saved with gradient scaling, but this training does not scale")


def test_state_that_a_file_of_tensors_cannot_hold(tmp_path):
    class Stateful(Net):
        def get_extra_state(self):
            return {"any": "thing"}

    training = Training()
    training.model = Stateful()
    training.optimizer = adamw(training.model)
    with pytest.raises(Unsupported, match="tensors only, but the model has _extra_state"):
        save_checkpoint(tmp_path, *training.parts, PROGRESS, keep=0)
    training = Training()
    training.model.register_buffer("odd", torch.zeros(1, dtype=torch.complex128))
    with pytest.raises(Unsupported, match=r"cannot hold odd: torch\.complex128"):
        save_checkpoint(tmp_path, *training.parts, PROGRESS, keep=0)
    assert list(tmp_path.iterdir()) == []
