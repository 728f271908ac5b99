"""A language model is trained with Muon, whose update is made orthogonal by five Newton-Schulz steps. The
optimizer was written anew from the formula, which multiplies X with its transpose; for a matrix with
more rows than columns that product has the long side squared. The usual code turns such a matrix first.
A good finding names the products of Newton-Schulz on tall matrices (not transposed), or this optimizer's
iteration as too dear for its shapes, and the line of a product in it.
"""

import torch
import torch.nn.functional as F

from common import Decoder, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "Newton-Schulz multiplies tall matrices on their long side",
    "FIX": "transpose a matrix with more rows than columns before and after",
}
VOCAB, WIDTH, LAYERS = by_device(16_000, 500), by_device(768, 96), by_device(8, 2)
BATCH, CONTEXT = by_device(32, 12), by_device(512, 64)
A, B, C = 3.4445, -4.7750, 2.0315


def orthogonal_as_it_is(update):
    x = update / (update.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T  # guilty
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x


def orthogonal_turned(update):
    tall = update.shape[0] > update.shape[1]
    x = update.T if tall else update
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    def __init__(self, matrices, orthogonal, lr=0.01, momentum=0.95):
        super().__init__(matrices, {"lr": lr, "momentum": momentum})
        self.orthogonal = orthogonal

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                mean = state["mean"].lerp_(p.grad, 1 - group["momentum"])
                with mixed():
                    update = self.orthogonal(p.grad.lerp(mean, group["momentum"]))
                p.add_(update, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


def build(orthogonal):
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    optimizers = Muon(matrices, orthogonal), torch.optim.AdamW(others, lr=3e-4, fused=True)
    data = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device()))

    def step():
        ids = next(data)
        with mixed():
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(orthogonal_as_it_is)


def clean():
    return build(orthogonal_turned)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
