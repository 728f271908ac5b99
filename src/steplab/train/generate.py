"""Text from a trained model, one byte after another.

A workload that can write text has `generator(model, rows, tokens)`: it makes room for `tokens`
tokens in each of `rows` rows and returns a function that takes new tokens (B, T), T being 1 or
more, and returns the logits (B, V) after the last of them.
"""

# B batch, T tokens, V vocabulary
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steplab.core import Recipe
from steplab.core.errors import UserError
from steplab.train.pretrained import ForwardContext, find_pretrained, load_for_inference
from steplab.workloads.workload import WorkloadEntry

BYTES = 256
# Tokens of a prompt that are read at once. Attention that keeps its scores keeps one row of them
# for each of these tokens: 20,000 tokens at once took 15 GB.
PROMPT_CHUNK = 512
ReadTokens = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TextGenerator:
    """A model, ready to write."""

    name: str  # the checkpoint it came from
    model: nn.Module
    generator: Callable[[nn.Module, int, int], ReadTokens]
    forward_context: ForwardContext  # autocast, where the recipe asks for it
    note: str = ""  # what a user should know about the model

    @torch.inference_mode()
    def generate(
        self,
        prompt: bytes,
        length: int,
        temperature: float = 0.0,
        top_k: int = 0,
        seed: int = 0,
        on_byte: Callable[[int], None] = lambda byte: None,
    ) -> bytes:
        """Return the `length` bytes that follow the prompt, the same for one seed and device.

        `on_byte` is called with each byte as soon as it is known. A vocabulary may have more ids
        than there are bytes; those are never chosen. This is not a Python generator: suspended
        inside the forward context it would leave its caller in that precision.
        """
        device = next(self.model.parameters()).device
        random = torch.Generator(device).manual_seed(seed)
        prompt_BT, written = torch.tensor([list(prompt)], device=device), bytearray()
        *chunks, tokens_BT = prompt_BT.split(PROMPT_CHUNK, 1)
        with self.forward_context():
            read = self.generator(self.model, 1, len(prompt) + length)
            for chunk_BT in chunks:
                read(chunk_BT)
            for _ in range(length):
                logits_BV = read(tokens_BT)[:, :BYTES]
                tokens_BT = sample_token(logits_BV, temperature, top_k, random)[:, None]
                written.append(int(tokens_BT))
                on_byte(written[-1])
        return bytes(written)


def sample_token(
    logits_BV: Tensor, temperature: float, top_k: int, generator: torch.Generator
) -> Tensor:
    """Return one token per row, (B,).

    A temperature of 0 takes the most likely token. `top_k` limits the choice to the k most likely
    ones; 0 means all.
    """
    if temperature == 0:
        return logits_BV.argmax(-1)
    scaled_BV = logits_BV.double() / temperature
    if 0 < top_k < scaled_BV.shape[-1]:
        least_B1 = scaled_BV.topk(top_k).values[:, -1:]
        scaled_BV = scaled_BV.masked_fill(scaled_BV < least_B1, -torch.inf)
    return torch.multinomial(scaled_BV.softmax(-1), 1, generator=generator)[:, 0]


def load_text_generator(
    path: Path | None, device: str, recipe: Recipe, own: WorkloadEntry | None = None
) -> TextGenerator:
    """Load the checkpoint `path` or the newest in that folder; None means the default folder.

    `own` is the user's own model, for a checkpoint of one.
    """
    found = find_pretrained(path, own)
    workload: Any = found.workload.open(found.config)
    if not hasattr(workload, "generator"):
        raise UserError(f"{found.path} is a model of {found.workload.name}, which writes no text.")
    model = workload.model()
    context = load_for_inference(found, model, device, recipe, "generation")
    return TextGenerator(str(found.path), model, workload.generator, context, found.note)
