"""Text from a trained model, one byte after another.

A workload that can write text has `generator(model, rows, tokens)`, which returns a `TokenReader`
(`workloads/workload.py`).
"""

# B batch, T tokens, V vocabulary
from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steplab.core import Recipe
from steplab.core.errors import UserError
from steplab.step.decode_step import DecodeGraphs, DecodeStep, graphs_on
from steplab.train.pretrained import ForwardContext, find_pretrained, load_for_inference
from steplab.workloads.workload import TokenReader, WorkloadEntry

BYTES = 256
# Tokens of a prompt that are read at once. Attention that keeps its scores keeps one row of them
# for each of these tokens: 20,000 tokens at once took 15 GB.
PROMPT_CHUNK = 512


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    A temperature of 0 takes the most likely one. `top_k` limits the choice to the k most likely;
    0 means all. One seed gives one text on one device.
    """

    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0

    def choose(self, logits_BV: Tensor, noise_BV: Tensor) -> Tensor:
        """Return one token per row, (B, 1), without a number on the host.

        `noise_BV` is drawn from the exponential distribution with rate 1: of weights divided by
        such numbers each is the largest with the probability that its weight has.
        """
        if self.temperature == 0:
            return logits_BV.argmax(-1, keepdim=True)
        scaled_BV = logits_BV.double() / self.temperature
        if 0 < self.top_k < scaled_BV.shape[-1]:
            least_B1 = scaled_BV.topk(self.top_k).values[:, -1:]
            scaled_BV = scaled_BV.masked_fill(scaled_BV < least_B1, -torch.inf)
        return (scaled_BV.softmax(-1) / noise_BV).argmax(-1, keepdim=True)


class TokenWriter:
    """Each call returns the next token of every row, (B, 1), and goes on with it.

    Reading the token and choosing the next is one step, replayed as a graph where `graphs` captures
    one. Random numbers are drawn beside it, so that a replay has new ones. Ids from `vocabulary` on
    are never chosen.
    """

    def __init__(
        self,
        reader: TokenReader,
        prompt_BT: Tensor,
        sampling: Sampling,
        graphs: DecodeGraphs | None,
        vocabulary: int = BYTES,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.reader, self.sampling, self.vocabulary = reader, sampling, vocabulary
        for chunk_BT in prompt_BT.split(PROMPT_CHUNK, 1):
            logits_BV = reader(chunk_BT)[:, :vocabulary]
        self._random = torch.Generator(prompt_BT.device).manual_seed(sampling.seed)
        self._noise_BV = torch.ones_like(logits_BV, dtype=torch.float64)
        self._draw()
        self._token_B1 = sampling.choose(logits_BV, self._noise_BV)
        self._is_first = True
        self.step = DecodeStep(self._read_and_choose, graphs, warn)

    def __call__(self) -> Tensor:
        """Return the next token of every row."""
        if self._is_first:
            self._is_first = False
            return self._token_B1.clone()
        self._draw()
        token_B1: Tensor = self.step()
        return token_B1

    def _draw(self) -> None:
        if self.sampling.temperature:
            self._noise_BV.exponential_(generator=self._random)

    def _read_and_choose(self) -> Tensor:
        logits_BV = self.reader.step(self._token_B1)[:, : self.vocabulary]
        self._token_B1.copy_(self.sampling.choose(logits_BV, self._noise_BV))
        return self._token_B1.clone()


@dataclass(frozen=True)
class TextGenerator:
    """A model, ready to write."""

    name: str  # the checkpoint it came from
    model: nn.Module
    generator: Callable[[nn.Module, int, int], TokenReader]
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
        warn: Callable[[str], None] = lambda text: warnings.warn(text, stacklevel=2),
    ) -> bytes:
        """Return the `length` bytes that follow the prompt, the same for one seed and device.

        `on_byte` is called with each byte as soon as it is known, and `warn` with why a step that a
        GPU could replay runs op by op. A vocabulary may have more ids
        than there are bytes; those are never chosen. This is not a Python generator: suspended
        inside the forward context it would leave its caller in that precision.
        """
        device = next(self.model.parameters()).device
        prompt_BT, written = torch.tensor([list(prompt)], device=device), bytearray()
        with self.forward_context():
            reader = self.generator(self.model, 1, len(prompt) + length)
            sampling = Sampling(temperature, top_k, seed)
            graphs = graphs_on(device)
            next_token = TokenWriter(reader, prompt_BT, sampling, graphs, warn=warn)
            for _ in range(length):
                written.append(int(next_token()))
                on_byte(written[-1])
        return bytes(written)


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
