"""Training on packed windows: the same learning from fewer windows, and resume is exact."""

import numpy as np
import pytest
import torch

from steplab.data.formats.time300b import write_time300b
from steplab.data.loader import Loader
from steplab.train.checkpoint_files import newest_checkpoint
from steplab.train.data import describe_series, training_windows
from steplab.train.loop import train
from steplab.train.stop import Stop
from steplab.workloads.tsmoe.model import Tsmoe
from steplab.workloads.workload import find_workload
from tests.train.tiny_runs import assert_same_state, make_spec, silent


@pytest.fixture
def data(tmp_path):
    source = np.random.default_rng(0)
    lengths = source.integers(2, 100, 60)
    series = [source.normal(size=n).cumsum().astype(np.float32) for n in lengths]
    write_time300b(tmp_path / "data" / "walks", series)
    return str(tmp_path / "data")


@pytest.mark.parametrize("patch", [1, 4])
def test_loss_and_gradients_are_those_of_the_pieces_alone(data, tmp_path, patch):
    """All windows in one batch, against all of their pieces in rows of their own, in fp64."""
    config = {"patch_length": patch, "aux_factor": 0.0, "quantiles": "0.1,0.9"}
    spec = make_spec(tmp_path, config=config, dataset_path=data, pack=True)
    windows = training_windows(spec)
    with Loader(windows, len(windows), 0, "cpu", shuffle=False) as loader:
        values, mask, documents = next(loader)
    pieces = [piece for number in range(len(windows)) for piece in windows.pieces(number)]
    rows, known = torch.zeros(2, len(pieces), windows.length)
    row = 0
    for number in range(len(windows)):
        for _, start, stop, place in windows.pieces(number):
            inside = slice(place, place + stop - start)
            rows[row, : stop - start] = values[number, inside]
            known[row, : stop - start] = mask[number, inside]
            row += 1
    torch.manual_seed(0)
    model = Tsmoe(find_workload("tsmoe").open(spec.config).config).double()
    found = {}
    for name, batch in {
        "packed": (values.double(), mask, documents),
        "alone": (rows.double(), known.bool()),
    }.items():
        loss = model(*batch).total
        found[name] = (loss, *torch.autograd.grad(loss, list(model.parameters())))
    assert len(windows) < 0.8 * len(pieces)
    for one, other in zip(found["packed"], found["alone"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-13)


def test_resume_is_exact(data, tmp_path):
    options = {"dataset_path": data, "pack": True, "steps_per_epoch": 6, "checkpoint_every": 3}
    whole = make_spec(tmp_path / "whole", **options)
    train(whole, silent(), Stop())
    halves = make_spec(tmp_path / "halves", **options, keep_last=0)
    train(halves, silent(), Stop())
    middle = tmp_path / "halves" / "step-00000003"
    newest_checkpoint(tmp_path / "halves").rename(tmp_path / "away")
    train(halves, silent(), Stop(), middle)
    assert_same_state(tmp_path / "whole", tmp_path / "halves", whole)


def test_padding_is_told_with_and_without_packing(data, tmp_path):
    lines = {}
    for pack in (False, True):
        spec = make_spec(tmp_path, dataset_path=data, pack=pack)
        lines[pack] = describe_series(training_windows(spec).series, spec)
    plain = lines[False].removeprefix("data ").split(" (with")[0]
    packed = lines[True].removeprefix("data ").split(" packed")[0]
    assert lines[False] == f"data {plain} (with --pack: {packed})"
    assert lines[True] == f"data {packed} packed (without --pack: {plain})"
    assert packed.endswith("unused=0.0%")
