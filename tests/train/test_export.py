"""A checkpoint as a Time-MoE folder, and back."""

import json

import pytest
import torch
from safetensors.torch import load_file

from steplab.cli.main import main
from steplab.core import TrainSpec
from steplab.core.codec import encode
from steplab.core.errors import UserError
from steplab.train.checkpoint import save_checkpoint
from steplab.train.checkpoint_files import TrainProgress
from steplab.train.pretrained import export_time_moe
from steplab.workloads.tsmoe.config import TsmoeConfig
from steplab.workloads.tsmoe.model import Tsmoe
from steplab.workloads.tsmoe.time_moe import load_time_moe
from steplab.workloads.workload import find_workload
from tests.workloads.tsmoe import time_moe_reference as reference

SHAPE = {
    "hidden_size": 16, "n_decoder_layers": 2, "n_head": 2, "num_experts": 4, "d_ff": 16,
    "d_expert": 8, "seq_max_len": 40, "horizons": "1,8", "layout": "time-moe",
}  # fmt: skip


def saved(folder, config=None, workload="tsmoe"):
    """A checkpoint of random weights, all of them away from their first values."""
    torch.manual_seed(1)
    resolved = find_workload("tsmoe").resolve("", {**SHAPE, **(config or {})})
    model = Tsmoe(TsmoeConfig(**resolved))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    spec = encode(TrainSpec(workload, resolved))
    progress = TrainProgress(step=3, position={}, spec=spec)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, save_checkpoint(folder, model, optimizer, scaler, progress, 0)


@pytest.mark.parametrize(
    "config",
    [{}, {"rope_theta": 123.5, "aux_factor": 0.1, "horizons": "4"}, {"k": 3, "d_expert": 5}],
)
def test_the_round_trip_keeps_every_bit(config, tmp_path):
    model, path = saved(tmp_path / "c", config)
    done = export_time_moe(tmp_path / "c", tmp_path / "out")
    assert done.source == path and done.tensors == len(load_file(done.folder / "model.safetensors"))
    assert sorted(p.name for p in done.folder.iterdir()) == ["config.json", "model.safetensors"]
    again, loaded = load_time_moe(done.folder)
    assert again == model.config
    own = dict(model.named_parameters())
    assert own.keys() == dict(loaded.named_parameters()).keys()
    assert all(torch.equal(p, own[name]) for name, p in loaded.named_parameters())


def test_the_description_of_time_moe_reads_what_was_written(tmp_path):
    model, _ = saved(tmp_path / "c")
    folder = export_time_moe(tmp_path / "c", tmp_path / "out").folder
    config = json.loads((folder / "config.json").read_text())
    tensors = {k: v.double() for k, v in load_file(folder / "model.safetensors").items()}
    values = torch.randn(2, 20, dtype=torch.float64)
    with torch.no_grad():
        outputs, _ = reference.forward(tensors, config, values)
        torch.testing.assert_close(torch.cat(outputs, -1), model.double()(values).outputs_BNH)
    assert config["model_type"] == "time_moe" and config["architectures"]
    assert config["num_key_value_heads"] == config["num_attention_heads"] == 2
    assert config["rope_theta"] == 10000 and not config["use_dense"] and config["apply_aux_loss"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"layout": "gelu"}, "two matrices instead of three"),
        ({"d_expert": 9}, "Train with --d-expert 8"),
        ({"patch_length": 2}, "--patch-length 2"),
        ({"num_expert_layers": 2}, "--num-expert-layers 2"),
        ({"quantiles": "0.1,0.9"}, "--quantiles 0.1,0.9"),
    ],
)
def test_what_time_moe_has_no_place_for_is_refused(config, said, tmp_path):
    saved(tmp_path / "c", config)
    with pytest.raises(UserError) as caught:
        export_time_moe(tmp_path / "c", tmp_path / "out")
    assert said in str(caught.value) and not (tmp_path / "out").exists()


def test_other_workloads_old_folders_and_damage_are_refused(tmp_path):
    _, path = saved(tmp_path / "c", workload="gpt")
    with pytest.raises(UserError, match="a model of gpt"):
        export_time_moe(path, tmp_path / "out")
    _, path = saved(tmp_path / "d")
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="exists already"):
        export_time_moe(path, tmp_path / "out")
    model_file = path / "model.safetensors"
    content = model_file.read_bytes()
    model_file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match="damaged"):
        export_time_moe(path, tmp_path / "new")
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {"c", "d", "out"}


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["export"]) == 2
    assert "no checkpoint" in capsys.readouterr().err
    saved(tmp_path / "checkpoints")
    assert main(["export", "--out", "deep/down/model"]) == 0
    out = capsys.readouterr().out
    assert "exported checkpoints/step-00000003 to deep/down/model" in out and "57 tensors" in out
    load_time_moe(tmp_path / "deep/down/model")
    assert main(["export", "--out", "/proc/x/y"]) == 2
    assert "Cannot write to" in capsys.readouterr().err
