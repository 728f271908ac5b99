"""Folders in the layout of Time-MoE, with random weights."""

import json

import torch
from safetensors.torch import save_file

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
