"""Models in the layout of Time-MoE on the Hugging Face hub: config.json and safetensors.

Nothing is downloaded, no code from the folder is run, no pickle is opened. Importing this module
leaves torch out; loading brings it in.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from steplab.core.codec import decode, encode
from steplab.core.errors import UserError
from steplab.core.input_file import file_kind, parse_json, read_input, shorten
from steplab.workloads.tsmoe.config import TsmoeConfig

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_PATTERN = "*.bin"
DTYPES = ("F32", "BF16", "F16")  # those whose every value fp32 can hold
HEAD = re.compile(r"lm_heads\.\d+\.out_layer\.weight")
LARGEST_CONFIG = 1 << 20  # bytes; the published ones have 1,000
MAX_LISTED = 5  # names in one error message
MODEL_TYPE = "time_moe"
# Bookkeeping of the library that wrote the file: nothing of the model depends on them.
IGNORED_KEYS = frozenset(
    "architectures auto_map initializer_range use_cache torch_dtype dtype transformers_version "
    "_name_or_path output_attentions output_hidden_states return_dict tie_word_embeddings".split()
)
# Values that the published models have for them; the weights are written as fp32.
BOOKKEEPING = {
    "architectures": ["TimeMoeForPrediction"],
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
}
# What Tsmoe can do in one way only: key, the only value, why another one is refused.
REQUIRED_VALUES: tuple[tuple[str, Any, str], ...] = (
    ("model_type", MODEL_TYPE, "so it is another kind of model"),
    ("use_dense", False, "so it has no experts, and this model is made of them"),
    ("apply_aux_loss", True, "which goes with use_dense only"),
    ("input_size", 1, "but a token is one point of one series here"),
    ("hidden_act", "silu", "but the experts here are SwiGLU"),
    ("rms_norm_eps", 1e-6, "but the norms here have 1e-06"),
    ("attention_dropout", 0.0, "but nothing is dropped here; set it to 0: forecasts stay the same"),
    ("rope_scaling", None, "but positions are not scaled here"),
)


def load_time_moe(folder: Path | str) -> tuple[TsmoeConfig, Tsmoe]:
    """Return (config, model) of a folder with config.json and safetensors; fp32, on the host."""
    from steplab.workloads.tsmoe.model import Tsmoe

    folder = Path(folder)
    config = read_config(folder)
    with open_tensors(folder) as tensors:
        _check_tensors(tensors, parameter_slices(config))
    model = Tsmoe(config)
    load_weights(folder, model)
    return config, model


def load_weights(folder: Path, model: Tsmoe) -> None:
    """Copy the weights of a folder into a model of that shape, all or, on any error, none."""
    import torch

    wanted = parameter_slices(model.config)
    with open_tensors(folder) as tensors, torch.no_grad():
        _check_tensors(tensors, wanted)
        own = dict(model.named_parameters())
        for name, part in wanted.items():
            own[part.parameter][part.at].copy_(tensors.read(name))


def _check_tensors(tensors: TensorFolder, wanted: dict[str, ParameterSlice]) -> None:
    """Raise a UserError that names what is missing, extra, misshapen or of another dtype."""
    here, there = wanted.keys(), tensors.shapes.keys()
    misshapen = [
        f"{name} (saved {list(tensors.shapes[name])}, model {list(wanted[name].shape)})"
        for name in sorted(here & there)
        if tensors.shapes[name] != wanted[name].shape
    ]
    faults = {
        "missing": sorted(here - there),
        "extra": sorted(there - here),
        "misshapen": misshapen,
    }
    listed = "; ".join(f"{fault}: {_first_few(names)}" for fault, names in faults.items() if names)
    if listed:
        raise UserError(
            f"{tensors.name} does not fit its config.json ({listed}).",
            _head_count_hint(tensors, wanted),
        )
    odd = sorted({code for code in tensors.dtypes.values() if code not in DTYPES})
    if odd:
        raise UserError(
            f"{tensors.name} holds {', '.join(odd)}, which fp32 cannot hold exactly.",
            f"Save the weights as one of {', '.join(DTYPES)}.",
        )


def _head_count_hint(tensors: TensorFolder, wanted: dict[str, ParameterSlice]) -> str:
    """Say when config and weights disagree on the horizons: some copies list one head too many."""
    asked, saved = (
        sum(map(bool, map(HEAD.fullmatch, names))) for names in (wanted, tensors.shapes)
    )
    if asked == saved:
        return ""
    return f"config.json lists {asked} horizon_lengths, but the weights have {saved} heads."


def _first_few(names: list[str]) -> str:
    rest = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + rest


@dataclass(frozen=True)
class HubConfig:
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
    data = parse_json(read_input(path, LARGEST_CONFIG), shorten(path))
    if not isinstance(data, dict):
        raise UserError(f"{path} is not an object.")
    file = _decode(data, str(path))
    try:
        return _to_config(file)
    except UserError as error:
        raise UserError(f"{path}: {error.message}", error.suggestion) from None


def render_config(config: TsmoeConfig) -> bytes:
    """Return config.json for a model; refuse one that Time-MoE cannot express."""
    _check_exportable(config)
    theta = config.rope_theta
    file = HubConfig(
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
    fixed = {key: value for key, value, _ in REQUIRED_VALUES if value is not None}
    data = {**BOOKKEEPING, **fixed, **encode(file)}
    return json.dumps(data, indent=2, sort_keys=True).encode() + b"\n"


def _decode(data: dict[str, Any], where: str) -> HubConfig:
    for key, only, why in REQUIRED_VALUES:
        if data.get(key, only) != only:
            raise UserError(f"{where} has {key} {data[key]!r}, {why}.")
    if "model_type" not in data:
        raise UserError(f"{where} has no model_type, so it is not that of a Time-MoE model.")
    known = {field.name for field in dataclasses.fields(HubConfig)}
    known |= IGNORED_KEYS | {key for key, _, _ in REQUIRED_VALUES}
    unknown = sorted(data.keys() - known)
    if unknown:
        raise UserError(
            f"{where} has keys that are not known and may change the model: {', '.join(unknown)}.",
            "Remove them if they do not.",
        )
    own = {field.name for field in dataclasses.fields(HubConfig)}
    file: HubConfig = decode(HubConfig, {k: v for k, v in data.items() if k in own}, where)
    return file


def _to_config(file: HubConfig) -> TsmoeConfig:
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


def _check_exportable(config: TsmoeConfig) -> None:
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
                f"Time-MoE cannot express --{flag} {getattr(config, name)}.",
                f"Train without --{flag}.",
            )


class ParameterSlice(NamedTuple):
    """`parameter[at]`, which has this shape; an `at` of () is the whole parameter.

    Ours are stacked: q, k and v in one matrix, gate and up of an expert in one, all experts of a
    layer in one tensor, all heads in one matrix. One table serves both ways, so that loading and
    exporting cannot disagree.
    """

    parameter: str
    at: tuple[int | slice, ...]
    shape: tuple[int, ...]


def parameter_slices(config: TsmoeConfig) -> dict[str, ParameterSlice]:
    """Return all tensors of a model of the layout time-moe, by their names in a Time-MoE file."""
    width = config.hidden_size
    found = {
        "model.embed_layer.emb_layer.weight": ParameterSlice(
            "embedding.value.weight", (), (width, 1)
        ),
        "model.embed_layer.gate_layer.weight": ParameterSlice(
            "embedding.gate.weight", (), (width, 1)
        ),
        "model.norm.weight": ParameterSlice("norm.weight", (), (width,)),
    }
    for number in range(config.n_decoder_layers):
        theirs, ours = f"model.layers.{number}", f"blocks.{number}"
        for name, part in (*_attention(width), *_mixture(config)):
            found[f"{theirs}.{name}"] = part._replace(parameter=f"{ours}.{part.parameter}")
    first = 0
    for number, points in enumerate(config.horizon_lengths):
        rows = (slice(first, first + points),)
        found[f"lm_heads.{number}.out_layer.weight"] = ParameterSlice(
            "heads.weight", rows, (points, width)
        )
        first += points
    return found


def _attention(width: int) -> Iterator[tuple[str, ParameterSlice]]:
    yield "input_layernorm.weight", ParameterSlice("attention_norm.weight", (), (width,))
    for number, letter in enumerate("qkv"):
        rows = (slice(number * width, (number + 1) * width),)
        theirs, ours = f"self_attn.{letter}_proj", "attention.qkv"
        yield f"{theirs}.weight", ParameterSlice(f"{ours}.weight", rows, (width, width))
        yield f"{theirs}.bias", ParameterSlice(f"{ours}.bias", rows, (width,))
    yield "self_attn.o_proj.weight", ParameterSlice("attention.out.weight", (), (width, width))
    yield "post_attention_layernorm.weight", ParameterSlice("norms.0.weight", (), (width,))


def _mixture(config: TsmoeConfig) -> Iterator[tuple[str, ParameterSlice]]:
    width, ours = config.hidden_size, "mixtures.0"
    router = ParameterSlice(f"{ours}.router.weight", (), (config.num_experts, width))
    yield "ffn_layer.gate.weight", router
    for number in range(config.num_experts):
        stacked = (f"{ours}.experts.w_in_EFD", f"{ours}.experts.w_out_EDF")
        for name, part in _expert(*stacked, (number,), width, config.d_expert):
            yield f"ffn_layer.experts.{number}.{name}", part
    shared = (f"{ours}.shared.w_in.weight", f"{ours}.shared.w_out.weight")
    for name, part in _expert(*shared, (), width, config.d_ff):
        yield f"ffn_layer.shared_expert.{name}", part
    gate = ParameterSlice(f"{ours}.shared_gate.weight", (), (1, width))
    yield "ffn_layer.shared_expert_gate.weight", gate


def _expert(
    w_in: str, w_out: str, which: tuple[int, ...], width: int, inner: int
) -> Iterator[tuple[str, ParameterSlice]]:
    yield "gate_proj.weight", ParameterSlice(w_in, (*which, slice(0, inner)), (inner, width))
    yield "up_proj.weight", ParameterSlice(w_in, (*which, slice(inner, 2 * inner)), (inner, width))
    yield "down_proj.weight", ParameterSlice(w_out, which, (width, inner))


if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TensorFolder:
    """Tensors by name, read one at a time."""

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]  # as safetensors calls them: F32, BF16, ...
    _files: Mapping[str, Any]  # tensor -> open file

    def read(self, name: str) -> Tensor:
        """Return one tensor, on the host, in its own dtype."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


@contextlib.contextmanager
def open_tensors(folder: Path) -> Iterator[TensorFolder]:
    """Open the tensor files of `folder`; their headers are checked against their sizes."""
    from safetensors import SafetensorError, safe_open

    files: dict[str, Any] = {}
    shapes, dtypes = {}, {}
    where, paths, index = _find(folder)
    with contextlib.ExitStack() as stack:
        for path in paths:
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path} cannot be read ({error}).") from None
            for name in sorted(file.keys()):
                if name in files:
                    raise UserError(f"{where} names files that hold {name} twice.")
                files[name] = file
                part = file.get_slice(name)
                shapes[name], dtypes[name] = tuple(part.get_shape()), part.get_dtype()
        strangers = sorted(files.keys() ^ index) if index is not None else []
        if strangers:
            raise UserError(f"{where} and its files do not agree on {strangers[0]}.")
        yield TensorFolder(str(where), shapes, dtypes, files)


def _find(folder: Path) -> tuple[Path, list[Path], set[str] | None]:
    """Return (what to call it, the files, the tensors that an index lists)."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file():
        return single, [single], None
    if index.is_file():
        listed = _read_index(index)
        return index, [folder / name for name in sorted(set(listed.values()))], set(listed)
    pickles = sorted(folder.glob(PICKLE_PATTERN))
    if pickles:
        raise UserError(
            f"{pickles[0]} is a pickle, which can run any code while it is read, so it is refused.",
            f"Get the model as {SINGLE_FILE}.",
        )
    raise UserError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}.")


def bytes_of_weights(folder: Path) -> int:
    """Return the size of the tensor files of `folder`."""
    _, paths, _ = _find(folder)
    for path in paths:
        if kind := file_kind(path):
            raise UserError(f"{shorten(path)} is {kind}.", "Copy or download the model again.")
    return sum(path.stat().st_size for path in paths)


def _read_index(path: Path) -> dict[str, str]:
    data = parse_json(read_input(path), shorten(path))
    try:
        listed = data["weight_map"]
        names = set(listed.values())
        sound = all(isinstance(name, str) and Path(name).name == name for name in names)
    except (KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise UserError(f"{path} is not an index of safetensors files in its own folder.")
    for name in names:
        if not name.endswith(".safetensors"):
            raise UserError(f"{path} names {name}, and only .safetensors files are read.")
    return dict(listed)


if TYPE_CHECKING:
    from steplab.workloads.tsmoe.model import Tsmoe
