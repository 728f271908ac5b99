"""Checkpoints that somebody resealed: checksums fit, and the content is absurd."""

import json
import math
import os
import random
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("hypothesis")
import torch
from hypothesis import HealthCheck, given, settings

from steplab.cli.main import main
from steplab.core.errors import UserError
from steplab.train.tensor_files import write_tensors
from tests.hostile import FIXTURE, hostile_json, recorded, seal

MANIFEST = "checkpoints/plain/step-00000002/checkpoint.json"
DOCUMENT = recorded(MANIFEST)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    with zipfile.ZipFile(FIXTURE) as archive:
        archive.extractall(tmp_path)
    return (tmp_path / MANIFEST).parent


def change(checkpoint: Path, *path: str | int, to: object) -> None:
    """Set one value of checkpoint.json and seal it again."""
    document = json.loads((checkpoint / "checkpoint.json").read_bytes())
    place = document["content"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    data = seal(json.dumps(document).encode())
    (checkpoint / "checkpoint.json").write_bytes(data)


def change_tensors(checkpoint: Path, name: str, tensors: dict[str, torch.Tensor]) -> None:
    """Replace a tensor file, with the size and the checksum of the new one."""
    (checkpoint / name).unlink()
    written = write_tensors(checkpoint / name, tensors)
    change(checkpoint, "files", name, to={"size": written.size, "crc32": written.crc32})


def resume(checkpoint: Path, capsys) -> tuple[int, str]:
    capsys.readouterr()
    code = main(["train", "--resume", str(checkpoint), "--device", "cpu", "--epochs", "2"])
    out, err = capsys.readouterr()
    assert "Traceback" not in err and len(err) < 1000 and "\x1b" not in out + err
    return code, err


CONFIG = ("progress", "spec", "config")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("progress", "step"), -5, "no training has done -5 steps"),
        (("progress", "step"), 2.5, "must be int"),
        (("progress", "step"), True, "must be a number"),
        (("progress", "position", "epoch"), -1, "is not in"),
        (("progress", "position", "index"), 10**12, "is not in"),
        ((*CONFIG, "hidden_size"), 10**12, "too few for the|would have"),
        ((*CONFIG, "n_decoder_layers"), 10**9, "must be at most 10,000"),
        ((*CONFIG, "num_experts"), 10**9, "too few for the"),
        ((*CONFIG, "horizons"), "1000000000", "is not longer than the longest horizon"),
        ((*CONFIG, "seq_max_len"), 2**40, "must be at most"),
        ((*CONFIG, "seq_max_len"), "x", "must be int"),
        (("progress", "spec", "settings", "workers"), 10**9, "must be at most"),
        (("progress", "spec", "settings", "accumulate"), 10**12, "must be at most"),
        (("python_random", "words"), [1, 2, 3], "random state"),
        (("python_random", "words", 0), -1, "random state"),
        (("python_random", "version"), 7, "random state"),
        (("numpy_random", "key"), [0] * 10, "random state"),
        (("numpy_random", "key", 5), 2**40, "random state"),
        (("numpy_random", "position"), 10**6, "random state"),
        (("numpy_random", "position"), -1, "random state"),
        (("optimizer", "groups", 0, "settings", "lr"), "fast", "was saved with lr"),
        (("optimizer", "groups", 0, "settings", "eps"), "NaN", "was saved with eps"),
        (("optimizer", "groups", 0, "settings", "betas"), [0.9], "was saved with betas"),
        (("scaler",), {"scale": 1.0}, "gradient scaling"),
    ],
)
def test_absurd_values_are_refused(checkpoint, path, value, words, capsys):
    change(checkpoint, *path, to=value)
    before = random.getstate()
    code, said = resume(checkpoint, capsys)
    assert code == 2
    assert any(word in said for word in words.split("|")), said
    if words == "random state":
        assert random.getstate() == before, "nothing was set"


def test_the_checkpoint_itself_resumes(checkpoint, capsys):
    assert resume(checkpoint, capsys)[0] == 0


STATE_OF_NO_RUN = torch.Generator().manual_seed(20_261_118).get_state()


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"cpu": torch.zeros(3, dtype=torch.uint8)},
        {"cpu": torch.full((5056,), math.nan)},
        {"cpu": STATE_OF_NO_RUN, "cuda.0": torch.zeros(1)},
    ],
)
def test_false_states_of_torch_are_refused(checkpoint, tensors, capsys):
    change_tensors(checkpoint, "rng.safetensors", tensors)
    before = random.getstate()
    code, said = resume(checkpoint, capsys)
    assert code == 2 and "random state" in said
    # The model was built, which seeds torch; but nothing of the checkpoint was set.
    assert not torch.equal(torch.get_rng_state(), STATE_OF_NO_RUN)
    assert random.getstate() == before


def test_optimizer_state_of_another_shape_is_refused(checkpoint, capsys):
    from safetensors.torch import load_file

    moments = load_file(checkpoint / "optimizer.safetensors")
    name = next(key for key in moments if key.startswith("exp_avg/"))
    for changed, words in (
        ({**moments, name: torch.zeros(7)}, "does not fit the model"),
        ({**moments, name: moments[name].to(torch.int32)}, "does not fit the model"),
        ({key: value for key, value in moments.items() if key != name}, "is not whole"),
        ({key: value for key, value in moments.items() if key[-6:] != name[-6:]}, "is missing"),
        ({}, "is missing"),
    ):
        change_tensors(checkpoint, "optimizer.safetensors", changed)
        code, said = resume(checkpoint, capsys)
        assert code == 2 and words in said


@pytest.mark.parametrize("name", ["checkpoint.json", "model.safetensors", "rng.safetensors"])
def test_a_pipe_in_a_checkpoint_is_not_waited_for(checkpoint, name, capsys):
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    for words in (["train", "--resume"], ["forecast", "shipped:nyc-weather", "--horizon", "3"]):
        flag = [] if words[0] == "train" else ["--checkpoint"]
        assert main([*words, *flag, str(checkpoint)]) == 2
        assert "pipe" in capsys.readouterr().err


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl"])
def test_a_link_beside_a_checkpoint_is_not_written_through(checkpoint, name, tmp_path, capsys):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (checkpoint.parent / name).symlink_to(precious)
    code, said = resume(checkpoint, capsys)
    assert code == 2 and "symbolic link" in said and precious.read_text() == "mine"


@given(data=hostile_json(DOCUMENT).map(seal))
@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_no_damage_of_a_manifest_is_a_traceback(data, checkpoint, capsys):
    (checkpoint / "checkpoint.json").write_bytes(data)
    assert resume(checkpoint, capsys)[0] in (0, 2, 3, 4)
    for extra in checkpoint.parent.glob("step-*"):
        if extra != checkpoint:
            for file in extra.iterdir():
                file.unlink()
            extra.rmdir()


def test_a_manifest_that_nests_without_end(checkpoint):
    from steplab.train.checkpoint import read_progress

    (checkpoint / "checkpoint.json").write_bytes(b"[" * 100_000)
    with pytest.raises(UserError, match="nests deeper"):
        read_progress(checkpoint)
