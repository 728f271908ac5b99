"""A character model with a training loop of its own, before and after steplab.

    steplab tune examples/own_loop.py:make               # find a recipe for it
    python examples/own_loop.py                          # the loop as it was
    python examples/own_loop.py --recipe recipe.toml     # the same loop with the recipe

`train` is a loop as people write it: a learning rate assigned at every step, several micro-batches,
clipped gradients, an evaluation and a checkpoint now and then. `train_tuned` is that loop with
`steplab.optimize`; what differs stands between the marks.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import steplab

STEPS, MICRO_BATCHES, BATCH, CONTEXT, CLIP = 40, 2, 8, 64, 1.0
EVALUATE_EVERY = 20
TEXT = Path(__file__).read_bytes()  # the data: this file


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the stream behind this block."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x_BTD)).chunk(3, dim=-1)
        )
        seen_BHTK = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(seen_BHTK.transpose(1, 2).flatten(2))
        return x_BTD + self.feed(self.norm2(x_BTD))


class Characters(nn.Module):
    """Predicts the next of 256 bytes."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        """Return logits (B, T, 256)."""
        place_T = torch.arange(bytes_BT.shape[1], device=bytes_BT.device)
        x_BTD = self.embed(bytes_BT) + self.position(place_T)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


def loss(model: nn.Module, bytes_BT: Tensor) -> Tensor:
    """Return the cross-entropy of every next byte."""
    logits_BTV = model(bytes_BT[:, :-1])
    return F.cross_entropy(logits_BTV.flatten(0, 1), bytes_BT[:, 1:].flatten())


def batches(size: int, seed: int = 0) -> Iterator[Tensor]:
    """Yield random windows of the text, (size, CONTEXT + 1)."""
    data, generator = torch.tensor(list(TEXT)), torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - CONTEXT, (size,), generator=generator)
        yield torch.stack([data[start : start + CONTEXT + 1] for start in starts])


def optimizer(model: nn.Module, **how: bool) -> torch.optim.Optimizer:
    """Make AdamW, without weight decay for norms and biases."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), **how)


def rate(step: int) -> float:
    """Return the learning rate: linear warm-up, then a cosine."""
    warmup = STEPS // 10
    if step < warmup:
        return 1e-3 * (step + 1) / warmup
    return 1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (STEPS - warmup)))


@torch.no_grad()
def evaluate(model: nn.Module, device: str) -> float:
    """Return the mean loss over windows that are always the same."""
    model.eval()
    stream = batches(BATCH, seed=1)
    mean = sum(loss(model, next(stream).to(device)).item() for _ in range(4)) / 4
    model.train()
    return mean


def make(width: int = 64, layers: int = 2, heads: int = 2) -> steplab.UserModel:
    """Return what `steplab tune examples/own_loop.py:make` asks for."""
    model = Characters(width, layers, heads)
    return steplab.UserModel(model, batches, loss, tokens_per_sequence=CONTEXT, optimizer=optimizer)


def train(device: str, checkpoint: Path) -> list[float]:
    """Train by hand; return the loss of every step."""
    torch.manual_seed(0)
    model, losses = Characters(64, 2, 2).to(device), []
    updates = optimizer(model)
    stream = batches(BATCH)
    for step in range(STEPS):
        for group in updates.param_groups:
            group["lr"] = rate(step)
        total = torch.zeros((), device=device)
        for _ in range(MICRO_BATCHES):
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                part = loss(model, next(stream).to(device)) / MICRO_BATCHES
            part.backward()
            total += part.detach()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        updates.step()
        updates.zero_grad(set_to_none=True)
        losses.append(total.item())
        if (step + 1) % EVALUATE_EVERY == 0:
            print(f"step {step + 1}: loss {losses[-1]:.4f}, held out {evaluate(model, device):.4f}")
            torch.save({"model": model.state_dict(), "adamw": updates.state_dict()}, checkpoint)
    return losses


def train_tuned(device: str, checkpoint: Path, recipe: str) -> list[float]:
    """Train with a recipe; return the loss of every step."""
    torch.manual_seed(0)
    model, losses = Characters(64, 2, 2).to(device), []
    # -- in the place of `updates = optimizer(model)`, autocast, torch.compile
    tuned = steplab.optimize(model, loss, recipe, optimizer, clip=CLIP)
    updates = tuned.optimizer
    stream = tuned.batches(batches(BATCH))
    # --
    for step in range(STEPS):
        for group in updates.param_groups:
            group["lr"] = rate(step)
        # -- in the place of the loss, backward(), clip_grad_norm_, step() and zero_grad()
        total = tuned([next(stream) for _ in range(MICRO_BATCHES)]).loss
        # --
        losses.append(total.item())
        if (step + 1) % EVALUATE_EVERY == 0:
            print(f"step {step + 1}: loss {losses[-1]:.4f}, held out {evaluate(model, device):.4f}")
            torch.save({"model": model.state_dict(), "adamw": updates.state_dict()}, checkpoint)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", help="as words, a preset or a file; without it by hand")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--checkpoint", type=Path, default=Path("own_loop.pt"))
    args = parser.parse_args()
    if args.recipe:
        train_tuned(args.device, args.checkpoint, args.recipe)
    else:
        train(args.device, args.checkpoint)
