"""A Hugging Face model by its name: `hf:llama`, `hf:path/to/folder`, with random weights.

The word is the name of a model type, a folder with a config.json, such a file, or a name on the Hub
whose config.json lies in the local cache. A config is data: nothing in it is executed, and nothing
is downloaded. Tokens and pixels are random.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from steplab.core.errors import Unsupported, UserError, did_you_mean
from steplab.core.input_file import is_folder, is_missing, parse_json, read_input, shorten
from steplab.core.spec import LONGEST_CONTEXT, MOST_LAYERS, option, require_at_most
from steplab.workloads.workload import HUGGING_FACE, WorkloadEntry

if TYPE_CHECKING:
    import torch
    from torch import nn

    from steplab.workloads.user_model import UserModel, UserWorkload

LARGEST_FILE = 4 << 20  # bytes; the largest config.json of a model has 300 kB, for its labels
USUAL_CONTEXT = 1024
MASKED_SHARE = 0.15  # of the tokens that a masked language model is asked for
IGNORED = -100  # a label that no loss counts

AUTO_CLASSES = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
    "text-classification": "AutoModelForSequenceClassification",
}
# What a task is where a type has several: an encoder and decoder before its halves, and BERT's
# mask before its use as a decoder.
PREFERENCE = ("seq2seq-lm", "masked-lm", "causal-lm", "image-classification")
# The size "tiny": fields of many configs. A type takes those that it has.
TINY: Mapping[str, int] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 1024,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "d_ff": 128,
    "num_decoder_layers": 2,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "image_size": 32,
    "patch_size": 8,
}
PARTS = ("_implementation", "_kernel", "kernel_config")  # fields that may name code on the Hub


@dataclass(frozen=True)
class HuggingFaceSettings:
    """What is not in the model's own config."""

    context: int = option(0, "tokens per sequence; 0: 1024, or as many as the model takes")
    settings: str = option("", "fields of the model's config: num_hidden_layers=2,hidden_size=64")
    task: Literal[
        "auto",
        "causal-lm",
        "masked-lm",
        "seq2seq-lm",
        "image-classification",
        "text-classification",
    ] = option("auto", "what it is trained for; auto: by its architecture or type")
    tiny: bool = option(False, "two narrow layers, whatever the config says")

    def __post_init__(self) -> None:
        if self.context < 0:
            raise UserError(f"context must be at least 1, not {self.context}.")
        require_at_most(self, LONGEST_CONTEXT, "context")


def find_hugging_face(name: str, source: str = "") -> WorkloadEntry:
    """Return the workload `hf:WORD`; a config.json with another hash than `source` is refused."""
    word = name.removeprefix(HUGGING_FACE)
    if importlib.util.find_spec("transformers") is None:
        raise Unsupported(
            f"{shorten(name)} needs transformers, which is not installed.",
            'pip install "steplab[hf]"',
        )
    file = _config_file(word)
    found = "" if file is None else hashlib.sha256(_read(file)).hexdigest()[:12]
    if source and found != source:
        raise UserError(
            f"{shorten(name)} has changed: the hash of its config.json was {shorten(source)}, now "
            f"it is {found}.",
            "Keep both configs in folders of their own, and bench each.",
        )
    full, tiny = HuggingFaceSettings(), HuggingFaceSettings(context=128, tiny=True)
    return WorkloadEntry(
        name=name,
        summary="a Hugging Face model with random weights",
        config=HuggingFaceSettings,
        factory=partial(_open, name),
        presets={"full": full, "tiny": tiny},
        # A type's own defaults are a model of billions of weights; a config is what it says.
        cpu_preset="tiny" if file is None else "full",
        gpu_preset="full",
        source=found,
    )


def _config_file(word: str) -> Path | None:
    """Return the config.json that a word leads to on this disk, the Hub's cache left out."""
    path = Path(word)
    if is_missing(path):
        if word.endswith(".json"):
            raise UserError(f"There is no file {shorten(word)}.")
        return None
    if not is_folder(path):
        return path
    file = path / "config.json"
    if not is_missing(file):
        return file
    if "/" not in word:  # a folder that happens to be called as a model type
        return None
    raise UserError(f"The folder {shorten(word)} has no config.json.")


def _read(file: Path) -> bytes:
    return read_input(file, LARGEST_FILE)


def _open(name: str, settings: HuggingFaceSettings) -> UserWorkload:
    from steplab.workloads.user_model import UserWorkload

    return UserWorkload(partial(_make, name.removeprefix(HUGGING_FACE), settings), {}, name)


def _make(word: str, settings: HuggingFaceSettings) -> UserModel:
    """Build the model on torch's default device."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read by the library when it is imported
    import torch
    import transformers

    from steplab.workloads.user_model import UserModel

    config = _model_config(word, settings)
    task = _task(word, config, settings.task)
    auto_class = getattr(transformers, AUTO_CLASSES[task])
    try:
        # Weights in fp32, whatever they are stored in: precision is the recipe's.
        model = auto_class.from_config(config, dtype=torch.float32)
    except Exception as error:
        first = " ".join(str(error).split())[:300]
        raise UserError(
            f"transformers cannot build {shorten(word)} for {task}: {type(error).__name__}: "
            f"{first.rstrip('.')}.",
            "Choose another --task, or look at the fields in its config.",
        ) from error
    inputs = _Inputs(word, config, task, settings.context)
    return UserModel(
        model,
        inputs.batches,
        loss=lambda model, batch: model(**batch),
        tokens_per_sequence=inputs.tokens,
        predict=_predict,
    )


def _predict(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    return model(**{name: value for name, value in batch.items() if name != "labels"})


def _model_config(word: str, settings: HuggingFaceSettings) -> Any:
    """Return transformers' config object for a word, with what the settings change."""
    from transformers import CONFIG_MAPPING

    file = _config_file(word)
    data: dict[str, Any] = {"model_type": word}
    if file is None and word not in CONFIG_MAPPING:
        file = _cached_config(word)
    if file is not None:
        data = parse_json(_read(file), file)
        _refuse_code(data, file)
    kind = data.get("model_type") if isinstance(data, dict) else None
    if kind not in CONFIG_MAPPING:
        raise UserError(
            f"{shorten(word)} has the model type {shorten(kind)!r}, which this transformers does "
            "not know.",
            "Use a newer transformers, or write my_model.py:make.",
        )
    config_class = CONFIG_MAPPING[kind]
    base = config_class(**{**data, "model_type": kind})
    changes: dict[str, Any] = {}
    if settings.tiny:
        changes |= {key: value for key, value in TINY.items() if getattr(base, key, None)}
        changes |= {key: 0 for key, value in base.to_dict().items() if _is_beyond(key, value)}
    changes |= _read_settings(settings.settings, base)
    if "num_hidden_layers" in changes:
        data = {key: value for key, value in data.items() if key != "layer_types"}
    try:
        config = config_class(**{**data, "model_type": kind, **changes})
    except Exception as error:
        told = " ".join(str(error).split())
        raise UserError(f"transformers refuses this config of {kind}: {told}") from None
    layers = getattr(config, "num_hidden_layers", None)
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise UserError(f"{shorten(word)} has {layers:,} layers, and {MOST_LAYERS:,} is the most.")
    if hasattr(config, "use_cache"):
        config.use_cache = False  # keys and values of past tokens are for generation
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    return config


def _is_beyond(key: str, value: Any) -> bool:
    """Whether a field is a token that a tiny vocabulary does not have."""
    return key.endswith("_token_id") and isinstance(value, int) and value >= TINY["vocab_size"]


def _cached_config(word: str) -> Path:
    """Return the config.json of a name on the Hub, out of the local cache; never download it."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(word, "config.json")
    except ValueError:  # no name that the Hub could have
        found = None
    if not isinstance(found, str):
        raise UserError(
            f"{shorten(word)} is no folder, no model type of transformers, and no name of the Hub "
            "whose config.json lies in the local cache; steplab downloads nothing.",
            f"Model types are llama, bert, t5, vit and the like; hf download {shorten(word)} "
            "config.json gets the config of a name on the Hub.",
        )
    return Path(found)


def _refuse_code(data: Any, file: Path) -> None:
    """Refuse a config that names code: its own modules, or kernels on the Hub."""
    if isinstance(data, list):
        for value in data:
            _refuse_code(value, file)
    if not isinstance(data, dict):
        return
    for key, value in data.items():
        if key == "auto_map":
            raise UserError(
                f"{shorten(file)} names code of its own (auto_map), which steplab does not run.",
                "Write a factory that builds the model: steplab tune my_model.py:make.",
            )
        if key.endswith(PARTS) and (not isinstance(value, str | None) or "/" in (value or "")):
            raise UserError(
                f"{shorten(file)} names kernels to fetch ({key}), which steplab does not run.",
                f"Leave {key} out of it.",
            )
        _refuse_code(value, file)


def _read_settings(words: str, config: Any) -> dict[str, Any]:
    """Read `hidden_size=64,rope_theta=1e4`; values are JSON, or else texts."""
    changes: dict[str, Any] = {}
    for word in filter(None, words.split(",")):
        key, equals, value = word.partition("=")
        if not equals or not hasattr(config, key):
            known = [key for key in config.to_dict() if not key.startswith("_")]
            raise UserError(
                f"--settings: the config of {config.model_type} has no field {shorten(key)!r}.",
                did_you_mean(key, known),
            )
        try:
            changes[key] = json.loads(value)
        except ValueError:
            changes[key] = value
    _refuse_code(changes, Path("--settings"))
    return changes


def _task(word: str, config: Any, asked: str) -> str:
    """Return what the model is trained for: as asked, by its architecture, or by its type."""
    import transformers

    mappings = {
        task: getattr(transformers, name)._model_mapping for task, name in AUTO_CLASSES.items()
    }
    fitting = [task for task, mapping in mappings.items() if type(config) in mapping]
    if asked != "auto" and asked in fitting:
        return asked
    if asked != "auto" or not fitting:
        what = f"for {asked}" if asked != "auto" else "for any task that steplab knows"
        raise UserError(
            f"transformers has no {config.model_type} {what}.",
            f"Use --task {' or '.join(fitting)}."
            if fitting
            else f"Known: {', '.join(AUTO_CLASSES)}; for others write my_model.py:make.",
        )
    for architecture in getattr(config, "architectures", None) or ():
        for task in fitting:
            if mappings[task][type(config)].__name__ == architecture:
                return task
    if "seq2seq-lm" in fitting and not config.is_encoder_decoder:
        fitting.remove("seq2seq-lm")
    return next((task for task in PREFERENCE if task in fitting), fitting[0])


class _Inputs:
    """Random batches of the kind that a task takes."""

    def __init__(self, word: str, config: Any, task: str, context: int) -> None:
        self.config = config
        self.task = task
        self.context = _context(word, config, context)
        self.tokens = {"image-classification": 1, "seq2seq-lm": 2 * self.context}.get(
            task, self.context
        )

    def batches(self, size: int) -> Iterator[dict[str, torch.Tensor]]:
        """Yield batches without end, the same ones every time."""
        import torch

        draw = torch.Generator().manual_seed(0)
        while True:
            if self.task == "image-classification":
                yield self._images(size, draw)
            else:
                yield self._tokens(size, draw)

    def _images(self, size: int, draw: torch.Generator) -> dict[str, torch.Tensor]:
        import torch

        side = getattr(self.config, "image_size", 224)
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        channels = getattr(self.config, "num_channels", 3)
        pixels_BCHW = torch.randn(size, channels, height, width, generator=draw, device="cpu")
        return {"pixel_values": pixels_BCHW, "labels": self._classes(size, draw)}

    def _tokens(self, size: int, draw: torch.Generator) -> dict[str, torch.Tensor]:
        import torch

        ids_BT = self._ids(size, draw)
        if self.task == "text-classification":
            return {"input_ids": ids_BT, "labels": self._classes(size, draw)}
        if self.task == "seq2seq-lm":
            return {"input_ids": ids_BT, "labels": self._ids(size, draw)}
        if self.task == "masked-lm":
            asked_BT = torch.rand(ids_BT.shape, generator=draw, device="cpu") < MASKED_SHARE
            asked_BT[:, 0] = True  # so that no batch is without one
            return {"input_ids": ids_BT, "labels": ids_BT.where(asked_BT, IGNORED)}
        return {"input_ids": ids_BT, "labels": ids_BT}

    def _ids(self, size: int, draw: torch.Generator) -> torch.Tensor:
        """Return token ids (size, context) without the padding token, which models mask."""
        import torch

        words, padding = self.config.vocab_size, getattr(self.config, "pad_token_id", None)
        shape = (size, self.context)
        ids_BT = torch.randint(words, shape, generator=draw, device="cpu")
        return ids_BT if padding is None else ids_BT.where(ids_BT != padding, (padding + 1) % words)

    def _classes(self, size: int, draw: torch.Generator) -> torch.Tensor:
        import torch

        return torch.randint(self.config.num_labels, (size,), generator=draw, device="cpu")


def _context(word: str, config: Any, asked: int) -> int:
    """Return the tokens per sequence: as asked, or a power of two that the model takes."""
    most = getattr(config, "max_position_embeddings", None) or LONGEST_CONTEXT
    if asked > most:
        raise UserError(
            f"context {asked} is longer than the {most} positions of {shorten(word)}.",
            f"Use --context {most} or less.",
        )
    # Roberta's 514 positions are for 512 tokens.
    return asked or min(USUAL_CONTEXT, 1 << (int(most).bit_length() - 1))
