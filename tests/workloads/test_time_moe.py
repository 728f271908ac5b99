import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from steplab.errors import UserError
from steplab.testing.tolerance import assert_as_good_as, relative_error
from steplab.workloads.tsmoe.config import PRESETS
from steplab.workloads.tsmoe.model import Tsmoe
from steplab.workloads.tsmoe.time_moe import load_time_moe, load_weights, parts, read_config
from tests.workloads import time_moe_reference as reference

# The keys of the published config.json, with sizes of our own.
CONFIG = {
    "architectures": ["TimeMoeForPrediction"],
    "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling_time_moe.TimeMoeForPrediction"},
    "apply_aux_loss": True,
    "hidden_act": "silu",
    "hidden_size": 24,
    "horizon_lengths": [1, 8, 16],
    "initializer_range": 0.02,
    "input_size": 1,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "model_type": "time_moe",
    "num_attention_heads": 3,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "router_aux_loss_factor": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_dense": False,
}
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
HEAD = "lm_heads.1.out_layer.weight"
GATE = "model.layers.1.ffn_layer.gate.weight"


def listed(config):
    """Names and shapes of the file that goes with a config.json, written down one by one."""
    h, i, n = config["hidden_size"], config["intermediate_size"], config["num_experts"]
    e = i // config["num_experts_per_tok"]
    found = {"model.norm.weight": (h,)}
    for name in ("emb_layer", "gate_layer"):
        found[f"model.embed_layer.{name}.weight"] = (h, 1)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        found[f"{layer}.input_layernorm.weight"] = (h,)
        found[f"{layer}.post_attention_layernorm.weight"] = (h,)
        for letter in "qkv":
            found[f"{layer}.self_attn.{letter}_proj.weight"] = (h, h)
            found[f"{layer}.self_attn.{letter}_proj.bias"] = (h,)
        found[f"{layer}.self_attn.o_proj.weight"] = (h, h)
        found[f"{layer}.ffn_layer.gate.weight"] = (n, h)
        found[f"{layer}.ffn_layer.shared_expert_gate.weight"] = (1, h)
        inner = {f"experts.{x}": e for x in range(n)} | {"shared_expert": i}
        for name, width in inner.items():
            for part in ("gate", "up"):
                found[f"{layer}.ffn_layer.{name}.{part}_proj.weight"] = (width, h)
            found[f"{layer}.ffn_layer.{name}.down_proj.weight"] = (h, width)
    for number, horizon in enumerate(config["horizon_lengths"]):
        found[f"lm_heads.{number}.out_layer.weight"] = (horizon, h)
    return found


def random_tensors(config=CONFIG, dtype=torch.float32):
    """Weights large enough that every part of the model shows in the output."""
    torch.manual_seed(3)
    shapes = listed(config)
    return {name: (torch.randn(shape) * 0.3).to(dtype) for name, shape in shapes.items()}


def write_folder(folder, tensors, config=CONFIG, shards=0):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if not shards:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    index = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        names = sorted(tensors)[shard::shards]
        save_file({name: tensors[name] for name in names}, folder / file)
        index |= dict.fromkeys(names, file)
    text = json.dumps({"metadata": {"total_size": 0}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


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
    shapes = {name: part.shape for name, part in parts(read).items()}
    assert shapes == listed(config) and len(shapes) == 463
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == parameters


def test_the_parts_cover_every_weight_once(tmp_path):
    write_folder(tmp_path, {})
    config = read_config(tmp_path)
    seen = {name: torch.zeros_like(p) for name, p in Tsmoe(config).named_parameters()}
    for part in parts(config).values():
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
    for name, part in parts(config).items():
        assert torch.equal(own[part.parameter][part.at], tensors[name].float()), name


def test_code_in_the_folder_is_not_run(tmp_path):
    ran = tmp_path / "ran"
    folder = write_folder(tmp_path / "m", random_tensors())
    for name in ("modeling_time_moe.py", "configuration_time_moe.py", "__init__.py"):
        (folder / name).write_text(f"open({str(ran)!r}, 'w')")
    load_time_moe(folder)
    assert not ran.exists()


def without(name):
    return lambda tensors: tensors.pop(name)


def with_more(tensors):
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)


def misshapen(tensors):
    tensors[HEAD] = torch.ones(9, 24)


def doubled(tensors):
    tensors[HEAD] = tensors[HEAD].double()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without(GATE), f"missing: {GATE}"),
        (with_more, "extra: model.layers.0.self_attn.rotary_emb.inv_freq"),
        (misshapen, f"misshapen: {HEAD} (saved [9, 24], model [8, 24])"),
        (without("lm_heads.2.out_layer.weight"), "lists 3 horizon_lengths, but the weights have 2"),
        (lambda tensors: tensors.clear(), "and 53 more"),
        (doubled, "holds F64, which fp32 cannot hold"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_whole(damage, said, tmp_path):
    tensors = random_tensors()
    write_folder(tmp_path / "good", tensors)
    _, model = load_time_moe(tmp_path / "good")
    before = {name: p.clone() for name, p in model.named_parameters()}
    for tensor in tensors.values():
        tensor += 1
    damage(tensors)
    folder = write_folder(tmp_path / "bad", tensors)
    for load in (lambda: load_time_moe(folder), lambda: load_weights(folder, model)):
        with pytest.raises(UserError) as caught:
            load()
        assert said in str(caught.value)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"horizon_lengths": [1, 8, 16, 32]}, "missing: lm_heads.3.out_layer.weight"),
        ({"horizon_lengths": [1, 8, 0]}, "horizons"),
        ({"horizon_lengths": [1, 8, 128]}, "not longer than the longest horizon 128"),
        ({"horizon_lengths": "many"}, "horizon_lengths must be"),
        ({"use_dense": True, "apply_aux_loss": False}, "use_dense True, so it has no experts"),
        ({"apply_aux_loss": False}, "apply_aux_loss False"),
        ({"num_key_value_heads": 1}, "heads that share their keys"),
        ({"input_size": 7}, "one point of one series"),
        ({"hidden_act": "gelu"}, "SwiGLU"),
        ({"rms_norm_eps": 1e-5}, "1e-06"),
        ({"attention_dropout": 0.1}, "forecasts stay the same"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "positions are not scaled"),
        ({"model_type": "llama"}, "another kind of model"),
        ({"sliding_window": 128, "patch_size": 2}, "patch_size, sliding_window"),
        ({"hidden_size": 25}, "does not split into 3 heads"),
        ({"hidden_size": "24"}, "hidden_size must be int"),
        ({"num_experts_per_tok": 9}, "k 9 is more than the 4 experts"),
        ({"num_experts_per_tok": 0}, "k must be at least 1"),
        ({"num_experts": None}, "num_experts must be int"),
        ({"hidden_size": 48}, "misshapen"),
    ],
)
def test_a_config_that_cannot_be_is_refused_with_the_reason(changes, said, tmp_path):
    folder = write_folder(tmp_path, random_tensors(), {**CONFIG, **changes})
    with pytest.raises(UserError) as caught:
        load_time_moe(folder)
    assert said in str(caught.value) and str(folder) in str(caught.value)


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


def index_of(folder):
    return folder / "model.safetensors.index.json"


def rewrite_index(change):
    def apply(folder):
        data = json.loads(index_of(folder).read_text())
        change(data["weight_map"])
        index_of(folder).write_text(json.dumps(data))

    return apply


def truncate(folder):
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-8])


def only_a_pickle(folder):
    for file in folder.glob("model*"):
        file.unlink()
    torch.save({}, folder / "pytorch_model.bin")


def copied(folder):
    first, second = sorted(folder.glob("*.safetensors"))
    second.write_bytes(first.read_bytes())


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate, "cannot be read"),
        (only_a_pickle, "is a pickle"),
        (lambda folder: index_of(folder).unlink(), "has neither model.safetensors nor"),
        (lambda folder: index_of(folder).write_text("[]"), "is not an index"),
        (lambda folder: index_of(folder).write_text("{"), "is not an index"),
        (rewrite_index(lambda names: names.update({HEAD: "../x.safetensors"})), "own folder"),
        (rewrite_index(lambda names: names.update({HEAD: 3})), "is not an index"),
        (rewrite_index(lambda names: names.update({HEAD: "weights.bin"})), "only .safetensors"),
        (rewrite_index(lambda names: names.update({HEAD: "x.safetensors"})), "cannot be read"),
        (rewrite_index(lambda names: names.pop(HEAD)), f"do not agree on {HEAD}"),
        (copied, "twice"),
        (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "is not an object"),
        (lambda folder: (folder / "config.json").write_text("{}"), "has no model_type"),
        (lambda folder: (folder / "config.json").unlink(), "cannot be read"),
    ],
)
def test_damaged_folders_are_one_sentence(damage, said, tmp_path):
    folder = write_folder(tmp_path, random_tensors(), shards=2)
    damage(folder)
    with pytest.raises(UserError) as caught:
        load_time_moe(folder)
    assert said in str(caught.value)


def test_reading_a_config_needs_no_torch():
    code = (
        "import sys; import steplab.workloads.tsmoe.time_moe, steplab.engine.checkpoint.origin; "
        "import steplab.engine.checkpoint.exporting; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
