"""Small HYDRA models whose weights are large enough that every part of them shows."""

from dataclasses import replace

import torch

from steplab.workloads.hydra.config import PRESETS
from steplab.workloads.hydra.model import Hydra

SHAPE = {"width": 64, "ff_width": 48, "blocks": 4, "recursions": 3, "context": 24, "heads": 4}
SMALL = replace(PRESETS["tiny"], **SHAPE, kv_heads=2, vocab_size=40, max_context=64)


def make(dtype=torch.float64, **changes):
    """Return a model with normal weights; the same ones for one shape of parameters."""
    torch.manual_seed(0)
    model = Hydra(replace(SMALL, **changes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.to(dtype)


def tokens(batch=2, length=24, seed=1):
    """Return random tokens of the small vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(40, (batch, length), generator=generator)


def gradients(model):
    """Return the gradients of the training loss by name."""
    model.zero_grad()
    model(tokens(), tokens(seed=2)).total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
