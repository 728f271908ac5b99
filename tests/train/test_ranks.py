"""Training on several ranks is training on one with as many more micro-batches."""

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from steplab.parallel.world import current_world
from steplab.train.checkpoint_files import list_checkpoints, newest_checkpoint
from steplab.train.loop import Trainer, train
from steplab.train.stop import Stop, StopVote
from tests.parallel.ranks import run_ranks
from tests.train.tiny_runs import make_spec, silent

RUN = {"steps_per_epoch": 6, "checkpoint_every": 3, "validate_every": 3, "log_every": 1}
UNEVEN = 3  # batches of a validation, which two ranks cannot share evenly


def train_here(folder, micro_batches, recipe="parallel=overlap", stop=None, **settings):
    """Train on the ranks of this group, or alone; return what this rank has seen."""
    world = current_world()
    accumulate = micro_batches // world.size
    spec = make_spec(
        folder, recipe, accumulate=accumulate, validation_batches=UNEVEN, **RUN | settings
    )
    spec = replace(spec, ranks=world.size)
    log = silent(folder if world.is_first else None)
    outcome = train(spec, log, stop or Stop(), newest_checkpoint(Path(folder)))
    return outcome.step, outcome.saved, outcome.metrics


def rows(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def series(folder, name):
    return [row[name] for row in rows(folder) if name in row]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    train_here(folder, 4, recipe="plain")
    return folder


def test_two_ranks_train_what_one_would(tmp_path, alone):
    first, second = run_ranks(train_here, 2, tmp_path, 4)
    assert first == second  # the same step, path and metrics on every rank
    assert series(tmp_path, "train/loss") == pytest.approx(series(alone, "train/loss"), rel=1e-5)
    for name in ("val/pred", "ood/pred"):
        assert series(tmp_path, name) == pytest.approx(series(alone, name), rel=1e-5)
    assert len(rows(tmp_path)) == len(rows(alone))  # rank 0 alone has written
    found = [json.loads((p / "checkpoint.json").read_text()) for p in list_checkpoints(tmp_path)]
    other = [json.loads((p / "checkpoint.json").read_text()) for p in list_checkpoints(alone)]
    positions = [one["content"]["progress"]["position"] for one in found]
    assert positions == [one["content"]["progress"]["position"] for one in other]
    assert found[0]["content"]["progress"]["spec"]["ranks"] == 2


def tokens_per_step(folder, micro_batches):
    world = current_world()
    spec = make_spec(folder, "parallel=overlap", accumulate=micro_batches // world.size)
    return Trainer(replace(spec, ranks=world.size), silent()).tokens


def test_tokens_are_those_of_all_ranks(tmp_path):
    alone = tokens_per_step(tmp_path, 4)
    assert run_ranks(tokens_per_step, 2, tmp_path, 4) == [alone, alone]


def stop_one_rank(folder):
    """Let rank 1 be asked to stop in its third step."""
    number = signal.SIGTERM.name

    class Late(Stop):
        asked = 0

        def __getattribute__(self, name):
            if name == "requested" and current_world().rank == 1:
                Late.asked += 1
                if Late.asked == 3:
                    self.__dict__.update(requested=True, signal=number)
            return super().__getattribute__(name)

    stop = Late()
    return train_here(folder, 2, stop=stop), stop.requested, stop.signal


def test_a_signal_to_one_rank_stops_all_at_one_step(tmp_path):
    first, second = run_ranks(stop_one_rank, 2, tmp_path)
    assert first == second
    (step, saved, _), requested, number = first
    assert 0 < step < 6 and requested and number == "SIGTERM"
    assert saved == newest_checkpoint(tmp_path) and saved.name == f"step-{step:08d}"


def votes():
    vote, stop = StopVote(), Stop()
    stop.requested = current_world().rank == 1
    stop.signal = "SIGINT" if stop.requested else ""
    return vote.take(stop), vote.take(stop), stop.signal


def test_a_vote_is_known_one_step_later():
    assert run_ranks(votes, 2) == [(False, True, "SIGINT")] * 2
