"""A feed ranker with three heads, for clicks, likes and time spent, on a shared trunk. To see whether one
task drowns the others, the script logs how large each task's gradient is at the trunk's weights, in every
step: one extra backward pass per task before the real one. Every hundredth step shows the same curve.
A good finding names the extra backward passes (autograd.grad) made for a log line, and their line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "a backward pass per loss term in every step, only to log the gradient norm of each term",
    "FIX": "log the norms every hundredth step",
}
SIZE, FACTS, PARTS = by_device(8192, 512), by_device(512, 128), 24
WIDTH, HIDDEN, EVERY = by_device(1024, 192), by_device(2048, 256), 100


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.Embedding(PARTS, FACTS)
        self.trunk = nn.Sequential(
            nn.Linear(FACTS, HIDDEN), nn.GELU(), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.GELU()
        )
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1)) for _ in range(3)
        )

    def forward(self, facts, part):
        shared = self.trunk(facts + self.parts(part))
        return [head(shared).squeeze(-1).float() for head in self.heads]


def visits():
    facts = torch.randn(SIZE, FACTS, device=device())
    marks = (torch.rand(2, SIZE, device=device()) < 0.2).float()
    return facts, torch.randint(PARTS, (SIZE,), device=device()), marks, torch.rand(SIZE, device=device())


def training(every):
    torch.manual_seed(0)
    model = Ranker().to(device())
    optimizer, batches = adamw(model), in_turn(visits)
    shared = [weight for weight in model.trunk.parameters() if weight.ndim == 2]
    curve, done = torch.zeros(3, device=device()), 0

    def step():
        nonlocal done
        facts, part, (clicked, liked), spent = next(batches)
        with mixed():
            click, like, stay = model(facts, part)
        terms = [
            F.binary_cross_entropy_with_logits(click, clicked),
            F.binary_cross_entropy_with_logits(like, liked),
            F.smooth_l1_loss(stay, spent),
        ]
        if done % every == 0:
            for place, term in enumerate(terms):
                found = torch.autograd.grad(term, shared, retain_graph=True)  # guilty
                curve[place] = torch.stack([gradient.norm() for gradient in found]).norm()
        done += 1
        loss = sum(terms)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def faulty():
    return training(every=1)


def clean():
    return training(EVERY)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
