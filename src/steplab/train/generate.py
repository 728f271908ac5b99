"""Text from a trained model, one byte after another.

A workload that can do so has `generator(model, rows, tokens)`: it makes room for `tokens` tokens
in each of `rows` rows and returns a function that takes new tokens (B, T), T being 1 or more, and
returns the logits (B, V) after the last of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steplab.core import Recipe
from steplab.core.errors import UserError
from steplab.forecasting.loading import ForwardContext, apply_recipe, default_checkpoint
from steplab.step.assemble import find_device
from steplab.train.pretrained import find_pretrained, load_pretrained
from steplab.workloads.workload import find_workload

__all__ = ["TextGenerator", "load_text_generator"]


# B batch, V vocabulary


def sample_token(
    logits_BV: Tensor, temperature: float, top_k: int, generator: torch.Generator
) -> Tensor:
    """Return one token per row, (B,).

    A temperature of 0 takes the likeliest. `top_k` leaves the k likeliest to choose from; 0: all.
    """
    if temperature == 0:
        return logits_BV.argmax(-1)
    scaled_BV = logits_BV.double() / temperature
    if 0 < top_k < scaled_BV.shape[-1]:
        least_B1 = scaled_BV.topk(top_k).values[:, -1:]
        scaled_BV = scaled_BV.masked_fill(scaled_BV < least_B1, -torch.inf)
    return torch.multinomial(scaled_BV.softmax(-1), 1, generator=generator)[:, 0]


# B batch, T tokens, V vocabulary


BYTES = 256
# Tokens of a prompt that are read at once. Attention that holds its scores holds this many rows of
# them: 20,000 tokens at once took 15 GB.
PIECE = 512
Reader = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TextGenerator:
    """A model, ready to write."""

    name: str  # the checkpoint it came from
    model: nn.Module
    generator: Callable[[nn.Module, int, int], Reader]
    forward_context: ForwardContext  # autocast, where asked for

    @torch.inference_mode()
    def generate(
        self,
        prompt: bytes,
        length: int,
        temperature: float = 0.0,
        top_k: int = 0,
        seed: int = 0,
        tell: Callable[[int], None] = lambda byte: None,
    ) -> bytes:
        """Return `length` bytes that follow the prompt, the same ones for one seed and device.

        `tell` gets each byte as soon as it is there. A vocabulary may have more ids than there
        are bytes; those are never chosen. Not a generator: the precision that is set here would
        stay set, or be lost, wherever it is left for a while.
        """
        device = next(self.model.parameters()).device
        random = torch.Generator(device).manual_seed(seed)
        prompt_BT, found = torch.tensor([list(prompt)], device=device), bytearray()
        *pieces, tokens_BT = prompt_BT.split(PIECE, 1)
        with self.forward_context():
            read = self.generator(self.model, 1, len(prompt) + length)
            for piece_BT in pieces:
                read(piece_BT)
            for _ in range(length):
                logits_BV = read(tokens_BT)[:, :BYTES]
                tokens_BT = sample_token(logits_BV, temperature, top_k, random)[:, None]
                found.append(int(tokens_BT))
                tell(found[-1])
        return bytes(found)


def load_text_generator(path: Path | None, device: str, recipe: Recipe) -> TextGenerator:
    """Load the checkpoint `path`, the newest in that folder, or of the default folder."""
    origin = find_pretrained(default_checkpoint() if path is None else path)
    workload: Any = find_workload(origin.workload).open(origin.config)
    if not hasattr(workload, "generator"):
        raise UserError(f"{origin.path} is a model of {origin.workload}, which writes no text.")
    model = workload.model()
    load_pretrained(origin.path, model, origin.config)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(find_device(device)).eval()
    context = apply_recipe(recipe, model, "generation")
    return TextGenerator(str(origin.path), model, workload.generator, context)
