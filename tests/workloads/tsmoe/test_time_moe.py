"""Time-MoE folders become models that compute what the description of Time-MoE says."""

import json
import subprocess
import sys

import pytest
import torch

from steplab.testing.tolerance import assert_as_good_as, relative_error
from steplab.workloads.tsmoe.config import PRESETS
from steplab.workloads.tsmoe.model import Tsmoe
from steplab.workloads.tsmoe.time_moe import load_time_moe, parameter_slices, read_config
from tests.workloads.tsmoe import time_moe_reference as reference
from tests.workloads.tsmoe.time_moe_folders import CONFIG, listed, random_tensors, write_folder

SIZES = {
    "time-moe-50m": {"hidden_size": 384, "intermediate_size": 1536},
    "time-moe-200m": {"hidden_size": 768, "intermediate_size": 3072},
}
PUBLISHED = {
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "num_experts": 8,
    "max_position_embeddings": 4096,
    "horizon_lengths": [1, 8, 32, 64],
}


def batch(dtype):
    torch.manual_seed(5)
    values = torch.randn(2, 33, dtype=torch.float64).cumsum(-1) / 3
    mask = torch.ones(2, 33, dtype=torch.bool)
    mask[0, 7], mask[1, 25:] = False, False
    return (values * mask).to(dtype), mask


@pytest.mark.parametrize(
    ("size", "parameters"), [("time-moe-50m", 113_352_192), ("time-moe-200m", 453_196_800)]
)
def test_names_and_shapes_of_the_published_models(size, parameters, tmp_path):
    config = {**CONFIG, **PUBLISHED, **SIZES[size]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = read_config(tmp_path)
    assert read == PRESETS[size]
    shapes = {name: part.shape for name, part in parameter_slices(read).items()}
    assert shapes == listed(config) and len(shapes) == 463
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == parameters


def test_the_parts_cover_every_weight_once(tmp_path):
    write_folder(tmp_path, {})
    config = read_config(tmp_path)
    seen = {name: torch.zeros_like(p) for name, p in Tsmoe(config).named_parameters()}
    for part in parameter_slices(config).values():
        assert seen[part.parameter][part.at].shape == part.shape
        seen[part.parameter][part.at] += 1
    assert all(bool((count == 1).all()) for count in seen.values())


@pytest.mark.parametrize("shards", [0, 3])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_experts_per_tok": 3, "intermediate_size": 48, "rope_theta": 500.0},
        {"num_hidden_layers": 12, "num_experts": 8, "horizon_lengths": [1, 8, 32, 63]},
    ],
)
def test_outputs_and_loss_are_those_of_the_description(changes, shards, tmp_path):
    config = {**CONFIG, **changes}
    tensors = random_tensors(config)
    if config["num_hidden_layers"] == 12:
        assert len(tensors) == 463
    _, model = load_time_moe(write_folder(tmp_path, tensors, config, shards))
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    with torch.no_grad():
        values, mask = batch(torch.float64)
        truth = torch.cat(reference.forward(wide, config, values)[0], -1)
        true_loss = reference.loss(wide, config, values, mask)
        narrow = values.float()
        peer = torch.cat(reference.forward(tensors, config, narrow)[0], -1)
        peer_loss = reference.loss(tensors, config, narrow, mask)
        single, single_loss = model(narrow).outputs_BNH, model(narrow, mask).total
        model.double()
        double, double_loss = model(values).outputs_BNH, model(values, mask).total
    assert relative_error(double, truth) < 1e-12
    assert relative_error(double_loss, true_loss) < 1e-12
    assert_as_good_as(single, peer, truth, "outputs")
    # A mean of hundreds of terms around 1: eight roundings of fp32, 1.2e-7 each.
    assert float(single_loss) == pytest.approx(float(peer_loss), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats_become_fp32_without_a_change(dtype, tmp_path):
    tensors = random_tensors(dtype=dtype)
    config, model = load_time_moe(write_folder(tmp_path, tensors))
    own = dict(model.named_parameters())
    assert {p.dtype for p in own.values()} == {torch.float32}
    for name, part in parameter_slices(config).items():
        assert torch.equal(own[part.parameter][part.at], tensors[name].float()), name


def test_code_in_the_folder_is_not_run(tmp_path):
    ran = tmp_path / "ran"
    folder = write_folder(tmp_path / "m", random_tensors())
    for name in ("modeling_time_moe.py", "configuration_time_moe.py", "__init__.py"):
        (folder / name).write_text(f"open({str(ran)!r}, 'w')")
    load_time_moe(folder)
    assert not ran.exists()


def test_what_a_config_may_leave_out_or_add(tmp_path):
    """A fifth horizon is fine where the file has its head; a lone horizon may be a number."""
    config = {**CONFIG, "horizon_lengths": [1, 8, 16, 32, 48], "_name_or_path": "x"}
    for key in ("num_key_value_heads", "rope_theta", "router_aux_loss_factor", "hidden_act"):
        del config[key]
    read, _ = load_time_moe(write_folder(tmp_path / "a", random_tensors(config), config))
    assert read.horizon_lengths == (1, 8, 16, 32, 48)
    assert (read.rope_theta, read.aux_factor) == (10_000.0, 0.02)
    one = {**CONFIG, "horizon_lengths": [4]}
    folder = write_folder(tmp_path / "b", random_tensors(one), {**one, "horizon_lengths": 4})
    assert load_time_moe(folder)[0].horizon_lengths == (4,)


def test_reading_a_config_needs_no_torch():
    code = (
        "import sys; import steplab.workloads.tsmoe.time_moe, steplab.train.pretrained; "
        "import steplab.train.pretrained; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
