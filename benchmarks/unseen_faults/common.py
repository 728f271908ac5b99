"""What the faults share: sizes, the device, a plain decoder, and a turn at the device.

UNSEEN_TINY=1 takes the tiny sizes, UNSEEN_DEVICE names the device, UNSEEN_TURN is a file that the
runner writes when it is this process's turn to use the device.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TINY = os.environ.get("UNSEEN_TINY") == "1"


def pick(full: int, tiny: int) -> int:
    """Return the size for a GPU, or the one for a try on a CPU."""
    return tiny if TINY else full


def device() -> str:
    """Return the device of a loop of one's own."""
    return os.environ.get("UNSEEN_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")


def by_device(cuda: int, cpu: int) -> int:
    """Return the size for a GPU, or the one with which a step takes 20 to 300 ms on one core."""
    return cuda if device() == "cuda" and not TINY else cpu


def mixed() -> torch.autocast:
    """Return bf16 autocast on a GPU; on a CPU the step stays in fp32."""
    return torch.autocast(device(), torch.bfloat16, enabled=device() == "cuda")


def in_turn(make: Callable[[], object], count: int = 8) -> Iterator:
    """Yield `count` ready batches in turn, for ever, at no cost."""
    ready = [make() for _ in range(count)]
    while True:
        yield from ready


def my_turn() -> None:
    """Wait until the runner lets this process use the device; without a runner, go on."""
    turn = os.environ.get("UNSEEN_TURN")
    if turn and device() == "cuda":
        torch.zeros(1, device="cuda")  # a context takes a second: it is there when the turn comes
    until = time.monotonic() + 900
    while turn and not os.path.exists(turn):
        if time.monotonic() > until:
            raise TimeoutError("the runner gave this process no turn in 15 minutes")
        time.sleep(0.02)


if os.environ.get("UNSEEN_WAITS") == "1":  # the worker of a factory, which has no main
    my_turn()


def main(**twins: Callable[[], Callable[[], object]]) -> None:
    """Time and profile the loop that the command line names: python FILE.py faulty."""
    import steplab

    step = twins[sys.argv[1]]()
    sync = torch.cuda.synchronize if device() == "cuda" else (lambda: None)
    for _ in range(12):  # what compiles does so before it has its turn
        step()
    sync()
    my_turn()
    for _ in range(4):
        step()
    sync()
    began = time.perf_counter()
    for _ in range(10):
        step()
    sync()
    with open("clock.json", "w") as file:
        json.dump({"step_ms": (time.perf_counter() - began) * 100}, file)
    run = steplab.profile(step)
    print(run.id)


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same."""
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """A small language model with learned positions."""

    def __init__(self, width: int, layers: int, vocab: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 64)) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def hidden(self, ids: Tensor) -> Tensor:
        """Return the final states."""
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits."""
        return self.head(self.hidden(ids))


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Cross-entropy of the next token under bf16 autocast."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        logits = model(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def token_batches(vocab: int, context: int) -> Callable[[int], Iterator[Tensor]]:
    """Return a source of random token batches that costs nothing: eight, on the device, in turn."""

    def batches(size: int) -> Iterator[Tensor]:
        ready = [torch.randint(vocab, (size, context + 1), device=device()) for _ in range(8)]
        while True:
            yield from ready

    return batches


def adamw(model: nn.Module, **how: object) -> torch.optim.Optimizer:
    """Return a fused AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=3e-4, **{"fused": True, **how})
