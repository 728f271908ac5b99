"""Training on a mixture of sets: drawn by shares, resumed exactly."""

import numpy as np
import pytest

from steplab.core.errors import UserError
from steplab.data.formats.time300b import write_time300b
from steplab.train.checkpoint import read_progress
from steplab.train.checkpoint_files import newest_checkpoint
from steplab.train.loop import train
from steplab.train.stop import Stop
from tests.train.tiny_runs import StopAfter, assert_same_state, make_spec, silent


@pytest.fixture
def two_sets(tmp_path):
    source = np.random.default_rng(0)
    for name, count in (("many", 30), ("few", 2)):
        walks = [source.normal(size=90).cumsum().astype(np.float32) for _ in range(count)]
        write_time300b(tmp_path / name, walks)
    return f"{tmp_path / 'many'},{tmp_path / 'few'}"


def test_12_steps_on_a_mixture_equal_5_and_resume_and_7(tmp_path, two_sets):
    mixed = {"dataset_path": two_sets, "mix": "0.75,0.25", "accumulate": 2}
    whole = make_spec(tmp_path / "whole", **mixed, steps_per_epoch=12)
    train(whole, silent(), Stop())
    halves = make_spec(tmp_path / "halves", **mixed, steps_per_epoch=12, checkpoint_every=5)
    assert train(halves, silent(), StopAfter(5)).step == 5
    saved = newest_checkpoint(tmp_path / "halves")
    position = read_progress(saved).position
    assert (position["epoch"], position["index"]) == (0, 5 * 2 * 4)  # past both sets' ends
    assert train(halves, silent(), Stop(), saved).step == 12
    assert_same_state(tmp_path / "whole", tmp_path / "halves", whole)


def test_other_shares_give_other_weights(tmp_path, two_sets):
    losses = []
    for number, shares in enumerate(("0.75,0.25", "0.5,0.5")):
        folder = tmp_path / str(number)
        spec = make_spec(folder, dataset_path=two_sets, mix=shares, steps_per_epoch=2)
        losses.append(train(spec, silent(), Stop()).metrics["loss"])
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    ("mix", "said"),
    [("0.5,0.3,0.2", "2 sets of series are mixed in 3 shares"), ("a,b", "not numbers")],
)
def test_wrong_mixtures_are_one_sentence(tmp_path, two_sets, mix, said):
    with pytest.raises(UserError, match=said):
        train(make_spec(tmp_path / "c", dataset_path=two_sets, mix=mix), silent(), Stop())


def test_shares_without_sets(tmp_path):
    with pytest.raises(UserError, match="--dataset-path a,b"):
        train(make_spec(tmp_path / "c", mix="0.5,0.5"), silent(), Stop())
