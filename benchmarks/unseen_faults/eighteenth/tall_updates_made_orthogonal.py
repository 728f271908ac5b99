"""A language model trained with Muon, written down from the blog post: momentum, and five Newton-Schulz
rounds that make each update orthogonal. The rounds multiply the matrix by its own transpose from the right,
so for the tall matrices (four times as many rows as columns) they work with squares as large as the long
side. The post transposes tall matrices first: the result is the same and the squares have the short side.
A good finding names the optimizer's products of the long side in the Newton-Schulz rounds, and their line.
"""

import torch
import torch.nn.functional as F

from common import Decoder, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "Newton-Schulz rounds of Muon run on the long side of tall matrices",
    "FIX": "transpose a matrix with more rows than columns before the rounds and back after them",
}
SIZE, CONTEXT, VOCAB = by_device(16, 4), by_device(512, 96), by_device(8192, 512)
WIDTH, LAYERS, ROUNDS = by_device(1024, 64), by_device(6, 3), 5
A, B, C = 3.4445, -4.7750, 2.0315


def rounds(x):
    x = x / (x.norm() + 1e-7)
    for _ in range(ROUNDS):
        square = x @ x.T  # guilty
        x = A * x + (B * square + C * square @ square) @ x
    return x


def short_rounds(x):
    if x.shape[0] > x.shape[1]:
        return rounds(x.T).T
    return rounds(x)


class Muon(torch.optim.Optimizer):
    def __init__(self, matrices, orthogonal, lr=0.002, momentum=0.95):
        super().__init__(matrices, {"lr": lr, "momentum": momentum})
        self.orthogonal = orthogonal

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["mean"] = torch.zeros_like(weight)
                state["mean"].lerp_(weight.grad, 1 - group["momentum"])
                update = self.orthogonal(weight.grad.lerp(state["mean"], group["momentum"]))
                ratio = max(1, weight.shape[0] / weight.shape[1]) ** 0.5
                weight.add_(update, alpha=-group["lr"] * ratio)


def training(orthogonal):
    torch.manual_seed(0)
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    inner = [weight for weight in model.blocks.parameters() if weight.ndim == 2]
    taken = {id(weight) for weight in inner}
    outer = [weight for weight in model.parameters() if id(weight) not in taken]
    muon, adam = Muon(inner, orthogonal), torch.optim.AdamW(outer, lr=3e-4, fused=True)
    batches = in_turn(lambda: torch.randint(VOCAB, (SIZE, CONTEXT + 1), device=device()))

    def step():
        ids = next(batches)
        with mixed():
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        muon.step()
        adam.step()
        return loss.detach()

    return step


def faulty():
    return training(rounds)


def clean():
    return training(short_rounds)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
