"""A short kill campaign: some kills of trainings, one of a search; and what the campaign sees."""

import json
import random
import signal
import sys
from itertools import cycle
from pathlib import Path

import pytest

pytest.importorskip("rich")
if not Path("/proc").exists():
    pytest.skip("processes are counted in /proc", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import kill_campaign
from kill_ranks import RankKill
from kills import Kill


@pytest.fixture
def short(monkeypatch):
    """Trainings of 30 steps."""
    for name in ("TRAIN", "RANKS"):
        words = getattr(kill_campaign, name).replace(f"epoch {kill_campaign.STEPS}", "epoch 30")
        monkeypatch.setattr(kill_campaign, name, words)
    monkeypatch.setattr(kill_campaign, "STEPS", 30)


@pytest.mark.slow
def test_kills_of_a_training_lose_nothing(tmp_path, short, monkeypatch):
    kills = cycle([Kill(signal.SIGTERM, 0.0, "step=8"), Kill(signal.SIGKILL, 0.0, "step=14")])
    monkeypatch.setattr(kill_campaign, "choose", lambda *about: next(kills))
    tally = kill_campaign.kill_training(2, random.Random(1), tmp_path)
    assert tally.faults == [] and tally.count == 2 and tally.ended


@pytest.mark.slow
def test_kills_of_ranks_lose_nothing(tmp_path, short, monkeypatch):
    """A killed rank is started again; one that SIGTERM reaches saves first, as all ranks then do;
    after a killed launcher the same command goes on."""
    kills = cycle(
        [
            RankKill("rank 1", "training", Kill(signal.SIGKILL, 0.0)),
            RankKill("rank 0", "training", Kill(signal.SIGTERM, 0.0)),
            RankKill("launcher", "saving", Kill(signal.SIGKILL, 0.0)),
        ]
    )
    monkeypatch.setattr(kill_campaign, "choose_kill", lambda chance: next(kills))
    tally = kill_campaign.kill_ranks(3, random.Random(1), tmp_path)
    assert tally.faults == [] and tally.count == 3 and tally.ended


@pytest.mark.slow
def test_a_kill_of_a_search_loses_nothing(tmp_path, monkeypatch):
    words = kill_campaign.TUNE.replace("budget 1", "budget 0.1")
    monkeypatch.setattr(kill_campaign, "TUNE", words)
    monkeypatch.setattr(kill_campaign, "choose", lambda *about: Kill(signal.SIGTERM, 4.0))
    tally = kill_campaign.kill_search(1, random.Random(1), tmp_path)
    assert tally.faults == [] and tally.count == 1 and tally.ended


def test_what_is_lost_is_found(tmp_path):
    """A step missing, one with another loss, a torn row, a signal that saved nothing."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    rows = [json.dumps({"step": step, "train/loss": loss}) for step, loss in ((1, 1.0), (3, 3.5))]
    (folder / "metrics.jsonl").write_text("\n".join([*rows, '{"step": 4, "tr']))
    whole = kill_campaign.Undisturbed({1: 1.0, 2: 2.0, 3: 3.0}, tmp_path, 1.0, 1.0)
    kill = Kill(signal.SIGTERM, 0.0)
    faults, repeated = kill_campaign.check_training(tmp_path, whole, kill, 0)
    assert faults == [
        'metrics.jsonl has the line \'{"step": 4, "tr\'',
        "step 3 follows step 1",
        "step 3: loss 3.5, not 3.0",
        "stopped after step 3, but saved step 0",
    ]
    assert repeated == 0


def test_campaigns_add_up():
    """As those of several processes do."""
    one, two = kill_campaign.Tally("tune"), kill_campaign.Tally("tune")
    one.note(Kill(signal.SIGTERM, 0.0), "starting", [])
    two.note(Kill(signal.SIGTERM, 0.0), "starting", ["lost"])
    two.note(Kill(signal.SIGHUP, 0.0), kill_campaign.ENDED, [])
    one.add(two)
    assert one.count == 2 and len(one.faults) == 1
    assert kill_campaign.table([one]).rows == (("tune", "starting", 0, 2, 0, 0, 2),)
