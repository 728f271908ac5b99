from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steplab.bench.precision import audit_toy
from steplab.probes.dtypes import audit_dtypes
from steplab.workloads.gpt.config import GPTConfig
from steplab.workloads.gpt.model import GPT

LAYERS = 3


def by_module(table: Any) -> dict[str, dict[str, Any]]:
    names = [column.name for column in table.columns]
    return {row[0]: dict(zip(names, row, strict=True)) for row in table.rows}


def small_gpt() -> tuple[GPT, Tensor]:
    config = GPTConfig(16, 32, layers=LAYERS, heads=2, context=8, max_context=8, vocab_size=11)
    return GPT(config), torch.arange(16).view(2, 8) % 11


class Custom(nn.Module):
    """Returns a dictionary and a tuple, leaves one module out and freezes another."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.norm(self.table(x))
        return {"y": y, "more": (y.argmax(-1), None)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_toys_loss_is_float32_while_its_activations_are_not(dtype: str) -> None:
    rows = by_module(audit_toy("cpu", {"bfloat16": "bf16", "float16": "fp16"}[dtype]))
    assert rows["loss"]["output"] == "float32"
    assert [rows[name]["output"] for name in ("fc1", "relu", "fc2")] == [dtype] * 3
    # The CPU's autocast leaves LayerNorm in the dtype of its input; CUDA's makes it float32.
    assert rows["norm"]["output"] == dtype
    for name in ("fc1", "norm", "fc2"):
        assert rows[name]["parameters"] == rows[name]["gradients"] == "float32"


def test_a_bare_mean_of_a_low_precision_output_stays_low() -> None:
    model = nn.Linear(4, 4)

    def forward() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss: Tensor = model(torch.ones(2, 4)).mean()
        return loss

    assert by_module(audit_dtypes(model, forward))["loss"]["output"] == "bfloat16"


def test_repeated_blocks_share_a_row_and_are_counted() -> None:
    model, tokens = small_gpt()
    rows = by_module(audit_dtypes(model, lambda: model(tokens, tokens)))
    assert rows["blocks.*.attention.q"]["count"] == LAYERS
    # One rotary module serves every block: it is counted in each place.
    assert rows["blocks.*.attention.rotary"]["count"] == LAYERS
    assert rows["head"]["count"] == 1
    assert "blocks" not in rows  # the list itself computes nothing
    linears = sum(isinstance(module, nn.Linear) for module in model.modules())
    assert sum(row["count"] for row in rows.values() if row["kind"] == "Linear") == linears


def test_outputs_agree_with_dtypes_seen_module_by_module() -> None:
    model, tokens = small_gpt()
    model.blocks[1].attention.q.bfloat16()  # type: ignore[union-attr]
    seen: dict[str, str] = {}

    def keep(name: str) -> Any:
        def note(module: nn.Module, inputs: object, output: object) -> None:
            # A norm returns the stream too.
            first = output[0] if isinstance(output, tuple) else output
            seen[name] = str(first.dtype)[6:]  # type: ignore[attr-defined]

        return note

    hooks = [m.register_forward_hook(keep(name)) for name, m in model.named_modules() if name]

    def forward() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss: Tensor = model(tokens, tokens)
        return loss

    rows = by_module(audit_dtypes(model, forward))
    for hook in hooks:
        hook.remove()
    assert rows["blocks.*.attention.q"]["parameters"] == "bfloat16, float32"
    for name in ("q", "k", "out"):
        expected = {seen[f"blocks.{i}.attention.{name}"] for i in range(LAYERS)}
        assert rows[f"blocks.*.attention.{name}"]["output"] == ", ".join(sorted(expected))


def test_containers_of_different_kinds_keep_their_numbers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    rows = by_module(audit_dtypes(model, lambda: model(torch.ones(2, 4)).sum()))
    assert rows["*"]["kind"] == "Linear" and rows["*"]["count"] == 2
    assert rows["1"]["kind"] == "ReLU"
    assert rows["(model)"]["kind"] == "Sequential"


def test_nested_outputs_unused_modules_and_frozen_parameters() -> None:
    model = Custom()
    rows = by_module(audit_dtypes(model, lambda: model(torch.ones(2, 4))["y"].sum()))
    assert rows["(model)"]["output"] == "float32, int64"
    assert rows["unused"]["output"] == "not called"
    assert rows["unused"]["gradients"] == rows["table"]["gradients"] == "none"
    assert rows["norm"]["gradients"] == "float32"


def test_nothing_is_left_behind_when_the_model_fails() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(RuntimeError):
        audit_dtypes(model, lambda: model(torch.ones(2, 3)).sum())
    assert not model._forward_hooks
    audit_dtypes(model, lambda: model(torch.ones(2, 4)).sum())
    assert not model._forward_hooks and model.weight.grad is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_cuda_autocast_makes_layer_norm_float32() -> None:
    rows = by_module(audit_toy("cuda", "fp16"))
    assert rows["norm"]["output"] == "float32"
    assert rows["fc2"]["output"] == "float16"
    assert rows["loss"]["output"] == "float32"
