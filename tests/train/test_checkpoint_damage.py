import json
import random
import shutil
import zlib

import pytest

pytest.importorskip("safetensors")
import torch

from steplab.core.errors import UserError
from steplab.train.checkpoint import (
    load_weights,
    read_progress,
    restore_checkpoint,
    save_checkpoint,
)
from steplab.train.checkpoint_files import TrainProgress, newest_checkpoint
from tests.train.small_training import Training, same

FILES = ("model.safetensors", "optimizer.safetensors", "rng.safetensors", "checkpoint.json")


@pytest.fixture
def folder(tmp_path):
    """Two checkpoints, of steps 2 and 4."""
    training = Training()
    for last in (2, 4):
        training.run(last - 2, last)
        save_checkpoint(
            tmp_path / "kept", *training.parts, TrainProgress(last, {"at": last}, {}), keep=0
        )
    return tmp_path / "kept"


def refuses(path, training: Training) -> str:
    """Restore, assert that nothing has changed, and return the message."""
    before, generator = training.content(), torch.get_rng_state()
    with pytest.raises(UserError) as caught:
        restore_checkpoint(path, *training.parts)
    assert same(before, training.content()) and torch.equal(generator, torch.get_rng_state())
    return str(caught.value)


@pytest.mark.parametrize("name", FILES[:3])
def test_flipped_bits_and_truncation_of_tensor_files(folder, name):
    training, path = Training(), newest_checkpoint(folder)
    training.run(0, 1)
    content = (path / name).read_bytes()
    chance = random.Random(name)
    for _ in range(25):
        place = chance.randrange(len(content))
        flipped = content[place] ^ 1 << chance.randrange(8)
        (path / name).write_bytes(content[:place] + bytes([flipped]) + content[place + 1 :])
        message = refuses(path, training)
        assert str(path / name) in message and "step-00000002 instead" in message
    for size in [0, 1, 8, len(content) - 1, *(chance.randrange(len(content)) for _ in range(5))]:
        (path / name).write_bytes(content[:size])
        assert f"{size} bytes instead of {len(content)}" in refuses(path, training)
    (path / name).write_bytes(content + b"\0")
    assert "damaged" in refuses(path, training)


def test_flipped_bits_and_truncation_of_the_document(folder):
    path = newest_checkpoint(folder)
    file = path / "checkpoint.json"
    content, progress = file.read_bytes(), read_progress(path)
    chance = random.Random(1)
    refused = 0
    for place in [*range(120), *(chance.randrange(len(content)) for _ in range(80))]:
        flipped = content[place] ^ 1 << chance.randrange(8)
        file.write_bytes(content[:place] + bytes([flipped]) + content[place + 1 :])
        try:
            # A changed space between two tokens is the only damage that may go unseen.
            assert read_progress(path) == progress and chr(content[place]).isspace()
        except UserError as error:
            assert str(file) in str(error)
            refused += 1
    assert refused > 150
    for size in [0, 1, 40, len(content) - 1, *(chance.randrange(len(content)) for _ in range(20))]:
        file.write_bytes(content[:size])
        assert "is not JSON" in refuses(path, Training())


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(folder, name):
    (newest_checkpoint(folder) / name).unlink()
    message = refuses(folder, Training())
    assert name in message and f"Resume from {folder / 'step-00000002'} instead." in message
    if name == "checkpoint.json":
        with pytest.raises(UserError, match=r"Resume from .*step-00000002 instead"):
            read_progress(folder)


def test_the_hint_passes_over_damaged_ones_and_is_silent_when_none_is_left(folder):
    shutil.copytree(folder / "step-00000004", folder / "step-00000006")
    for step in (4, 6):
        (folder / f"step-{step:08d}" / "model.safetensors").write_bytes(b"")
    assert "step-00000002 instead" in refuses(folder, Training())
    (folder / "step-00000002" / "rng.safetensors").unlink()
    assert "instead." not in refuses(folder, Training())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "does not belong to a steplab checkpoint"),
        ('{"step": 3}', "does not belong to a steplab checkpoint"),
        ('{"steplab_checkpoint": true}', "does not belong to a steplab checkpoint"),
        ('{"steplab_checkpoint": 99}', "has version 99; this steplab reads up to 2. Upgrade"),
        ('{"steplab_checkpoint": 1}', "does not match its checksum"),
        ("[" * 100_000, "nests deeper"),
        ("\xff", "is not JSON"),
    ],
)
def test_foreign_and_newer_documents(folder, text, message):
    (newest_checkpoint(folder) / "checkpoint.json").write_bytes(text.encode("latin-1"))
    assert message in refuses(folder, Training())
    with pytest.raises(UserError, match=r"checkpoint\.json"):
        load_weights(folder, Training().model)


def test_a_document_that_mentions_other_files(folder):
    file = newest_checkpoint(folder) / "checkpoint.json"
    document = json.loads(file.read_text())
    document["content"]["files"]["../../elsewhere.safetensors"] = {"size": 1, "crc32": 1}
    document["crc32"] = zlib.crc32(json.dumps(document["content"], sort_keys=True).encode())
    file.write_text(json.dumps(document))
    assert "is damaged: it mentions ../../elsewhere.safetensors" in refuses(folder, Training())


def test_a_reformatted_document_is_still_the_same(folder):
    file = newest_checkpoint(folder) / "checkpoint.json"
    file.write_text(json.dumps(json.loads(file.read_text()), indent=2, sort_keys=True))
    assert restore_checkpoint(folder, *Training().parts).position == {"at": 4}


def test_weights_alone_are_checked_too(folder):
    path, training = newest_checkpoint(folder), Training()
    (path / "model.safetensors").write_bytes(b"\x80\x04]")
    before = training.content()
    with pytest.raises(UserError, match="damaged: it has 3 bytes"):
        load_weights(path, training.model)
    assert same(before, training.content())
