import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("safetensors")
import torch

from steplab.core.errors import UserError
from steplab.train.checkpoint import read_progress, restore_checkpoint, save_checkpoint
from steplab.train.checkpoint_files import TrainProgress, find_checkpoint, newest_checkpoint
from tests.train.small_training import Training

SOURCE = Path(__file__).parents[2] / "src"


def saved(folder, steps, keep=0):
    training = Training()
    return [
        save_checkpoint(folder, *training.parts, TrainProgress(step, {}, {}), keep)
        for step in steps
    ]


def names(folder) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize(("keep", "left"), [(0, 4), (1, 1), (2, 2), (9, 4)])
def test_the_newest_are_kept(tmp_path, keep, left):
    saved(tmp_path, [1, 2, 3, 4], keep)
    assert names(tmp_path) == [f"step-{n:08d}" for n in range(5 - left, 5)]
    assert newest_checkpoint(tmp_path) == tmp_path / "step-00000004"


def test_the_one_just_written_stays_even_when_others_have_more_steps(tmp_path):
    saved(tmp_path, [8, 9])
    saved(tmp_path, [5], keep=1)
    assert names(tmp_path) == ["step-00000005"]


def test_a_negative_number_to_keep_is_refused_before_anything_is_removed(tmp_path):
    saved(tmp_path, [1, 2])
    with pytest.raises(UserError, match="0 to keep all"):
        saved(tmp_path, [3], keep=-1)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_saving_a_step_again_overwrites_nothing_and_counts_as_newer(tmp_path):
    saved(tmp_path, [7, 7, 7])
    assert names(tmp_path) == ["step-00000007", "step-00000007.1", "step-00000007.2"]
    assert newest_checkpoint(tmp_path) == tmp_path / "step-00000007.2"
    saved(tmp_path, [7], keep=1)
    assert names(tmp_path) == ["step-00000007.3"]
    assert read_progress(tmp_path).step == 7


def test_steps_sort_as_numbers(tmp_path):
    saved(tmp_path, [99_999_999, 100_000_000])
    assert newest_checkpoint(tmp_path) == tmp_path / "step-100000000"


def test_other_things_in_the_folder_are_left_alone(tmp_path):
    (tmp_path / "step-00000001").mkdir()  # nothing that save has written
    (tmp_path / "profiler").mkdir()
    (tmp_path / "step-notes.txt").write_text("mine")
    saved(tmp_path, [2, 3], keep=1)
    assert names(tmp_path) == ["profiler", "step-00000001", "step-00000003", "step-notes.txt"]


def test_drafts_of_dead_processes_go_and_those_of_living_ones_stay(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    for process in (child.pid, os.getpid(), os.getppid()):
        (tmp_path / f".draft-{process}-ab12").mkdir()
    (tmp_path / f".draft-{child.pid}-ab12" / "model.safetensors").write_bytes(b"half")
    saved(tmp_path, [1])
    assert names(tmp_path) == [f".draft-{os.getppid()}-ab12", "step-00000001"]


def test_find(tmp_path):
    first, second = saved(tmp_path / "kept", [1, 2])
    assert find_checkpoint(first) == first
    assert find_checkpoint(tmp_path / "kept") == second
    second.rename(tmp_path / "best")
    assert find_checkpoint(tmp_path / "best") == tmp_path / "best"
    assert newest_checkpoint(tmp_path) is None and newest_checkpoint(tmp_path / "nowhere") is None


def test_what_is_no_checkpoint(tmp_path):
    saved(tmp_path / "kept", [1])
    (tmp_path / "empty").mkdir()
    cases = {
        tmp_path / "nowhere": "There is no checkpoint .*nowhere.$",
        tmp_path / ("long" * 100): "longer than a file name may be",
        tmp_path / "kept" / "step-00000009": "The newest in .*kept is step-00000001.",
        tmp_path / "empty": "There is no checkpoint in .*empty.",
        tmp_path / "kept" / "step-00000001" / "model.safetensors": "a folder. Use .*step-00000001.",
    }
    for path, message in cases.items():
        with pytest.raises(UserError, match=message):
            restore_checkpoint(path, *Training().parts)


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "pytorch_model.bin", "no_suffix"])
def test_pickles_are_refused_and_not_opened(tmp_path, name):
    torch.save({"step": Exploding()}, tmp_path / name)
    with pytest.raises(UserError, match="is a pickle, which can run any code"):
        restore_checkpoint(tmp_path / name, *Training().parts)


class Exploding:
    def __reduce__(self):
        return (os.abort, ())


def test_reading_progress_needs_no_torch(tmp_path):
    saved(tmp_path, [12])
    code = (
        "import sys, pathlib\n"
        "from steplab.train.checkpoint import read_progress\n"
        f"assert read_progress(pathlib.Path({str(tmp_path)!r})).step == 12\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=SOURCE, check=False).returncode == 0
