"""Files that steplab 0.1.0 wrote before its first release still open.

fixtures/v0_1.zip holds a pack of Runs, a ladder, its recipe and two tiny checkpoints.
"""

import json
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("torch")

from steplab.cli.main import main
from steplab.core import Recipe, Run
from steplab.core.budget import TERMS
from steplab.store import Store
from steplab.techniques.recipes import read_recipe_file
from steplab.tune.folder import LadderFolder

FIXTURE = Path(__file__).parent / "fixtures" / "v0_1.zip"


@pytest.fixture
def stored(tmp_path):
    with zipfile.ZipFile(FIXTURE) as archive:
        archive.extractall(tmp_path)
    return tmp_path


def test_every_run_of_a_pack_opens_and_is_reported(stored, capsys):
    store = Store(stored / "store")
    assert main(["runs", "--unpack", str(stored / "runs.zip"), "--store", str(store.root)]) == 0
    runs = [run for _, run in store.all()]
    assert len(runs) == 6 and all(isinstance(run, Run) for run in runs)
    profiles = [run.profile for run in runs if run.profile is not None]
    steps = [step for profile in profiles for step in profile.budget.steps]
    assert len(profiles) == 3 and steps
    for step in steps:
        assert set(step.terms) <= set(TERMS)
        assert sum(step.terms.values()) + step.residual_ms == pytest.approx(step.wall_ms)
        assert step.categories
    page = stored / "page.html"
    assert main(["report", "--store", str(store.root), "--out", str(page)]) == 0
    assert "own_model.py:recurrent" in page.read_text()
    capsys.readouterr()


def test_a_ladder_and_its_recipe_open(stored):
    ladder = LadderFolder(stored / "ladder").load()
    assert ladder.finished and len(ladder.rungs) == 8
    recipe = read_recipe_file(stored / "recipe.toml")
    assert recipe == Recipe({"compile": {"scope": "blocks"}, "optimizer": {"impl": "fused"}})
    assert ladder.winner.techniques == recipe.techniques
    LadderFolder(stored / "again").save(ladder)
    assert LadderFolder(stored / "again").load() == ladder


@pytest.mark.parametrize(("name", "scaling"), [("plain", "max"), ("onepass", "series")])
def test_training_goes_on_from_a_checkpoint(stored, capsys, name, scaling):
    folder = stored / "checkpoints" / name
    words = ["train", "--resume", "--checkpoint-dir", str(folder), "--epochs", "2"]
    assert main(words) == 0
    assert "step=4 loss=" in capsys.readouterr().out
    saved = json.loads((folder / "step-00000004" / "checkpoint.json").read_text())
    assert saved["content"]["progress"]["spec"]["settings"]["normalize"] == scaling
