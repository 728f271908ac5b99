"""Checkpoints of several ranks: in slices, complete or absent, read by any number of ranks."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("safetensors")
import torch
from torch.utils._pytree import tree_map

from steplab.core.errors import UserError
from steplab.data.loader import Loader
from steplab.parallel.world import current_world
from steplab.testing.tolerance import assert_as_good_as
from steplab.train import shared_save
from steplab.train.checkpoint import load_weights, open_weights
from steplab.train.checkpoint_files import newest_checkpoint, read_verified_manifest
from steplab.train.loop import Trainer, train
from steplab.train.pretrained import export_time_moe
from steplab.train.stop import Stop
from steplab.train.tensor_files import SavedTensors
from tests.parallel.ranks import run_ranks
from tests.train.tiny_runs import make_spec, silent

MICRO_BATCHES = 4
# Sizes that 2 and 4 do not divide, so that slices differ in length and some are empty.
UNEVEN = {"hidden_size": 12, "d_ff": 18, "d_expert": 10, "num_experts": 3, "n_head": 2}
TIME_MOE = {"layout": "time-moe", "d_ff": 20}
STEPS = 12
# (ranks, until which step): ten more steps after the first save.
THERE_AND_BACK = ((4, 2), (2, 5), (1, 8), (4, STEPS))


def spec_here(folder, recipe, **settings):
    """The same run on the ranks of this group."""
    world = current_world()
    settings = {"checkpoint_every": 2, "log_every": 1, "keep_last": 0, **settings}
    accumulate = MICRO_BATCHES // world.size
    spec = make_spec(folder, recipe, {**UNEVEN, **TIME_MOE}, accumulate=accumulate, **settings)
    return replace(spec, ranks=world.size)


def schedule(steps):
    """Learning rates that do not depend on the last step."""
    return {"steps_per_epoch": steps, "epochs": 1, "warmup_steps": 2, "min_lr": 1e-3}


def train_here(folder, recipe, steps, start=None):
    """Train to `steps` from the newest checkpoint of `start` or from new weights."""
    spec = spec_here(folder, recipe, **schedule(steps))
    log = silent(folder if current_world().is_first else None)
    return train(spec, log, Stop(), newest_checkpoint(start or folder)).saved


def save_again(path, folder, recipe):
    """Resume and save at once, so that nothing but the slices can differ."""
    trainer = Trainer(spec_here(folder, recipe), silent())
    trainer.resume(path)
    return trainer.save()


def on_ranks(size, function, *arguments):
    """Call a function on a group of this size, or here; return what rank 0 returns."""
    return function(*arguments) if size == 1 else run_ranks(function, size, *arguments)[0]


def content(path):
    """Return every tensor of a checkpoint, whole, and what its document says of the optimizer."""
    manifest, found = read_verified_manifest(path), {}
    for kind in ("model", "optimizer"):
        with SavedTensors([path / name for name in manifest.files_of(kind)]) as saved:
            found |= {f"{kind}/{name}": saved.read(name).clone() for name in saved.shapes}
    groups = {json.dumps(g.settings): set(g.parameters) for g in manifest.optimizer.groups}
    return found, groups, manifest.progress.position


def assert_same(one, other):
    (tensors, *rest), (others, *other_rest) = content(one), content(other)
    assert tensors.keys() == others.keys() and rest == other_rest
    assert [n for n in tensors if not torch.equal(tensors[n], others[n])] == []


@pytest.mark.parametrize(
    "recipe",
    ["parallel=bucket", "parallel=zero1", "parallel=fsdp", "parallel=fsdp,parallel.replicate=2"],
)
def test_slices_go_from_4_ranks_to_2_to_1_and_back(tmp_path, recipe):
    first = on_ranks(4, train_here, tmp_path / "first", recipe, 2)
    files = {p.relative_to(first).as_posix() for p in first.rglob("*") if p.is_file()}
    slices = {
        f"{kind}/rank-{r:05d}.safetensors" for kind in ("model", "optimizer") for r in range(4)
    }
    assert files == {"checkpoint.json", "rng.safetensors", *slices}
    path, alone = first, recipe.replace(",parallel.replicate=2", "")
    for size in (2, 1, 4):
        path = on_ranks(size, save_again, path, tmp_path / str(size), recipe if size > 1 else alone)
        assert_same(first, path)
        assert (path / "model.safetensors").is_file() == (size == 1)


def losses(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows if "train/loss" in row]


@pytest.mark.parametrize("scheme", ["fsdp", "zero1"])
def test_a_run_goes_on_bit_for_bit_on_other_numbers_of_ranks(tmp_path, scheme):
    recipe = f"parallel={scheme},parallel.exact=true"
    on_ranks(1, train_here, tmp_path / "one", recipe, STEPS)
    for size, steps in THERE_AND_BACK:
        on_ranks(size, train_here, tmp_path / "many", recipe, steps)
    assert len(losses(tmp_path / "many")) == STEPS
    assert losses(tmp_path / "many") == losses(tmp_path / "one")
    assert_same(newest_checkpoint(tmp_path / "one"), newest_checkpoint(tmp_path / "many"))


def train_in_fp64(folder, monkeypatch):
    """Train in one process whose rounding does not count."""
    fetch = Loader.__next__

    def fetch_doubled(loader):
        return tree_map(lambda x: x.double() if x.is_floating_point() else x, fetch(loader))

    trainer = Trainer(spec_here(folder, "plain", **schedule(STEPS)), silent(folder))
    trainer.step.model.double()
    with monkeypatch.context() as patch:
        patch.setattr(Loader, "__next__", fetch_doubled)
        torch.set_default_dtype(torch.float64)
        try:
            trainer.run(Stop())
        finally:
            torch.set_default_dtype(torch.float32)


def test_without_exact_a_run_goes_on_within_rounding(tmp_path, monkeypatch):
    recipe = "parallel=fsdp"
    train_in_fp64(tmp_path / "truth", monkeypatch)
    on_ranks(1, train_here, tmp_path / "one", recipe, STEPS)
    for size, steps in THERE_AND_BACK:
        on_ranks(size, train_here, tmp_path / "many", recipe, steps)
    many, one = (torch.tensor(losses(tmp_path / name)) for name in ("many", "one"))
    truth = torch.tensor(losses(tmp_path / "truth"), dtype=torch.float64)
    assert len(many) == STEPS
    assert_as_good_as(many, one, truth)


def read_by_torch(path):
    """Return the model's tensors as torch.distributed.checkpoint reads them from a folder."""
    import torch.distributed.checkpoint as dcp

    with open_weights(path) as saved:
        state = {name: torch.empty(shape) for name, shape in saved.shapes.items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(path / "model")), no_dist=True)
    return state


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_reader_reads_the_slices(tmp_path):
    path = on_ranks(2, train_here, tmp_path, "parallel=fsdp", 2)
    state = read_by_torch(path)
    with open_weights(path) as saved:
        assert all(torch.equal(saved.read(name), tensor) for name, tensor in state.items())


def test_weights_are_loaded_and_exported_from_slices(tmp_path):
    path = on_ranks(2, train_here, tmp_path / "c", "parallel=fsdp", 2)
    model = Trainer(spec_here(tmp_path, "plain"), silent()).step.model
    load_weights(path, model)
    with open_weights(path) as saved:
        assert all(torch.equal(p, saved.read(name)) for name, p in model.named_parameters())
    done = export_time_moe(path, tmp_path / "exported")
    whole = on_ranks(1, save_again, path, tmp_path / "whole", "parallel=fsdp")
    again = export_time_moe(whole, tmp_path / "again")
    written = [(one.folder / "model.safetensors").read_bytes() for one in (done, again)]
    assert written[0] == written[1]


def start_from(path, folder):
    trainer = Trainer(spec_here(folder, "parallel=fsdp"), silent())
    trainer.start_from(path)
    return trainer.save()


def test_a_new_run_on_ranks_starts_from_slices_and_from_time_moe(tmp_path):
    path = on_ranks(2, train_here, tmp_path / "c", "parallel=fsdp", 2)
    exported = export_time_moe(path, tmp_path / "exported").folder
    for source in (path, exported):
        new = on_ranks(2, start_from, source, tmp_path / f"from {source.name}")
        with open_weights(path) as one, open_weights(new) as other:
            assert one.shapes == other.shapes
            assert all(torch.equal(one.read(name), other.read(name)) for name in one.shapes)


def save_on_a_full_disk(folder, full_rank):
    trainer = Trainer(spec_here(folder, "parallel=fsdp"), silent())
    write = shared_save.write_tensors

    def full(*arguments):
        if current_world().rank == full_rank:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments)

    shared_save.write_tensors = full
    try:
        trainer.save()
    except UserError as error:
        return str(error)
    finally:
        shared_save.write_tensors = write


@pytest.mark.parametrize("full_rank", [0, 1])
def test_a_full_disk_of_one_rank_is_told_by_all_and_leaves_nothing(tmp_path, full_rank):
    said = run_ranks(save_on_a_full_disk, 2, tmp_path / "c", full_rank)
    assert said[0] == said[1] and "the disk is full" in said[0]
    assert list((tmp_path / "c").iterdir()) == []


@pytest.fixture
def sliced(tmp_path):
    return on_ranks(2, train_here, tmp_path / "c", "parallel=fsdp", 2)


def rewrite(path: Path, change) -> None:
    """Change the document of a checkpoint as a forger would, with a valid checksum."""
    from steplab.train.checkpoint_files import _checksum

    file = path / "checkpoint.json"
    data = json.loads(file.read_text())
    change(data["content"]["files"])
    data["crc32"] = _checksum(data["content"])
    file.write_text(json.dumps(data))


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "/etc/passwd", "model/../../x.safetensors", "model/rank-1.st",
     "model/rank-00000.safetensors/x", "model\\rank-00000.safetensors", "x/rank-00000.safetensors"],
)  # fmt: skip
def test_a_document_cannot_name_files_outside(sliced, name):
    rewrite(sliced, lambda files: files.update({name: {"size": 1, "crc32": 1}}))
    with pytest.raises(UserError, match="it mentions"):
        read_verified_manifest(sliced)


def test_a_missing_or_damaged_slice_is_named(sliced):
    file = sliced / "model" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match=r"model/rank-00000\.safetensors is damaged"):
        load_weights(sliced, torch.nn.Linear(1, 1))
    file.unlink()
    with pytest.raises(UserError, match=r"model/rank-00000\.safetensors is missing"):
        load_weights(sliced, torch.nn.Linear(1, 1))
    rewrite(sliced, lambda files: files.pop("model/rank-00000.safetensors"))
    with pytest.raises(UserError, match="do not make a tensor"):
        load_weights(sliced, torch.nn.Linear(1, 1))
