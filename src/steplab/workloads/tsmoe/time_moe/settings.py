"""config.json of a Time-MoE model, to our config and back. No torch."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steplab.codec import decode, encode
from steplab.errors import UserError
from steplab.workloads.tsmoe.config import TsmoeConfig

CONFIG_FILE = "config.json"
MODEL_TYPE = "time_moe"
# Bookkeeping of the library that wrote the file: nothing of the model depends on them.
IGNORED = frozenset(
    "architectures auto_map initializer_range use_cache torch_dtype dtype transformers_version "
    "_name_or_path output_attentions output_hidden_states return_dict tie_word_embeddings".split()
)
# What the published models have of them; the weights are written as fp32.
BOOKKEEPING = {
    "architectures": ["TimeMoeForPrediction"],
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
}
# What Tsmoe has one way of doing: key, the only value, why another one is refused.
FIXED: tuple[tuple[str, Any, str], ...] = (
    ("model_type", MODEL_TYPE, "so it is another kind of model"),
    ("use_dense", False, "so it has no experts, and this model is made of them"),
    ("apply_aux_loss", True, "which goes with use_dense only"),
    ("input_size", 1, "but a token is one point of one series here"),
    ("hidden_act", "silu", "but the experts here are SwiGLU"),
    ("rms_norm_eps", 1e-6, "but the norms here have 1e-06"),
    ("attention_dropout", 0.0, "but nothing is dropped here; set it to 0: forecasts stay the same"),
    ("rope_scaling", None, "but positions are not scaled here"),
)


@dataclass(frozen=True)
class TimeMoeFile:
    """The keys of config.json that decide what the model computes."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_experts: int
    num_experts_per_tok: int
    max_position_embeddings: int
    horizon_lengths: tuple[int, ...] | int
    num_key_value_heads: int | None = None
    rope_theta: float = 10_000.0
    router_aux_loss_factor: float = 0.02


def is_time_moe(folder: Path) -> bool:
    """Whether the folder has a model of the hub, of Time-MoE or another; checkpoints have none."""
    return (folder / CONFIG_FILE).is_file()


def read_config(folder: Path) -> TsmoeConfig:
    """Return the config of the model in `folder`; refuse what the model here cannot do."""
    path = folder / CONFIG_FILE
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not JSON.") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} is not an object.")
    file = _decode(data, str(path))
    try:
        return _to_config(file)
    except UserError as error:
        raise UserError(f"{path}: {error.message}", error.suggestion) from None


def render_config(config: TsmoeConfig) -> bytes:
    """Return config.json for a model; one that Time-MoE has no place for is refused."""
    _refuse_foreign(config)
    theta = config.rope_theta
    file = TimeMoeFile(
        config.hidden_size,
        config.d_ff,
        config.n_decoder_layers,
        config.n_head,
        config.num_experts,
        config.k,
        config.seq_max_len,
        config.horizon_lengths,
        config.n_head,
        int(theta) if theta.is_integer() else theta,
        config.aux_factor,
    )
    fixed = {key: value for key, value, _ in FIXED if value is not None}
    data = {**BOOKKEEPING, **fixed, **encode(file)}
    return json.dumps(data, indent=2, sort_keys=True).encode() + b"\n"


def _decode(data: dict[str, Any], where: str) -> TimeMoeFile:
    for key, only, why in FIXED:
        if data.get(key, only) != only:
            raise UserError(f"{where} has {key} {data[key]!r}, {why}.")
    if "model_type" not in data:
        raise UserError(f"{where} has no model_type, so it is not that of a Time-MoE model.")
    known = {field.name for field in dataclasses.fields(TimeMoeFile)}
    known |= IGNORED | {key for key, _, _ in FIXED}
    unknown = sorted(data.keys() - known)
    if unknown:
        raise UserError(
            f"{where} has keys that are not known and may change the model: {', '.join(unknown)}.",
            "Remove them if they do not.",
        )
    own = {field.name for field in dataclasses.fields(TimeMoeFile)}
    file: TimeMoeFile = decode(TimeMoeFile, {k: v for k, v in data.items() if k in own}, where)
    return file


def _to_config(file: TimeMoeFile) -> TsmoeConfig:
    keys = file.num_key_value_heads
    if keys is not None and keys != file.num_attention_heads:
        raise UserError(
            f"num_key_value_heads {keys} is not num_attention_heads {file.num_attention_heads}, "
            "and heads that share their keys are not known here."
        )
    lengths = file.horizon_lengths
    horizons = (lengths,) if isinstance(lengths, int) else lengths
    return TsmoeConfig(
        hidden_size=file.hidden_size,
        n_decoder_layers=file.num_hidden_layers,
        n_head=file.num_attention_heads,
        num_experts=file.num_experts,
        k=file.num_experts_per_tok,
        d_ff=file.intermediate_size,
        d_expert=file.intermediate_size // max(1, file.num_experts_per_tok),
        seq_max_len=file.max_position_embeddings,
        horizons=",".join(map(str, horizons)),
        layout="time-moe",
        aux_factor=file.router_aux_loss_factor,
        rope_theta=file.rope_theta,
    )


def _refuse_foreign(config: TsmoeConfig) -> None:
    if config.layout != "time-moe":
        raise UserError(
            f"A model of the layout {config.layout} cannot become a Time-MoE model: its experts "
            "have two matrices instead of three, its heads have biases, and it has no final norm.",
            "Train with --layout time-moe.",
        )
    if config.d_expert != config.d_ff // config.k:
        raise UserError(
            f"A routed expert of Time-MoE is as wide as d_ff / k, here {config.d_ff // config.k}, "
            f"but d_expert is {config.d_expert}.",
            f"Train with --d-expert {config.d_ff // config.k}.",
        )
    for name, only in (("patch_length", 1), ("num_expert_layers", 1), ("quantiles", "")):
        if getattr(config, name) != only:
            flag = name.replace("_", "-")
            raise UserError(
                f"Time-MoE has no place for --{flag} {getattr(config, name)}.",
                f"Train without --{flag}.",
            )
