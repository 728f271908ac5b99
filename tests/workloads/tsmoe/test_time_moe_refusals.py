"""Time-MoE folders that do not load, and what is said of them."""

import json

import pytest
import torch

from steplab.core.errors import UserError
from steplab.workloads.tsmoe.time_moe import load_time_moe, load_weights
from tests.workloads.tsmoe.time_moe_folders import CONFIG, random_tensors, write_folder

HEAD = "lm_heads.1.out_layer.weight"
GATE = "model.layers.1.ffn_layer.gate.weight"


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
        (lambda folder: index_of(folder).write_text("{"), "is not JSON"),
        (rewrite_index(lambda names: names.update({HEAD: "../x.safetensors"})), "own folder"),
        (rewrite_index(lambda names: names.update({HEAD: 3})), "is not an index"),
        (rewrite_index(lambda names: names.update({HEAD: "weights.bin"})), "only .safetensors"),
        (rewrite_index(lambda names: names.update({HEAD: "x.safetensors"})), "cannot be read"),
        (rewrite_index(lambda names: names.pop(HEAD)), f"do not agree on {HEAD}"),
        (copied, "twice"),
        (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "is not an object"),
        (lambda folder: (folder / "config.json").write_text("{}"), "has no model_type"),
        (lambda folder: (folder / "config.json").unlink(), "There is no file"),
    ],
)
def test_damaged_folders_are_one_sentence(damage, said, tmp_path):
    folder = write_folder(tmp_path, random_tensors(), shards=2)
    damage(folder)
    with pytest.raises(UserError) as caught:
        load_time_moe(folder)
    assert said in str(caught.value)
