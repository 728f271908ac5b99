"""A language model is trained with Muon, written after a blog post: the momentum of every matrix is made
orthogonal by five Newton-Schulz iterations. The post transposes matrices that are taller than wide
and this version does not, so the products of the feed-forward's first matrix, four times as tall as
wide, are made on its long side. The result is the same either way.
A good finding names the products of the Newton-Schulz iteration on the longer side of a matrix (or
at least that the update takes most of the step) and one of its lines.
"""

import torch
import torch.nn.functional as F

from common import Decoder, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "Newton-Schulz iterates over the products of rows also where a matrix has more rows than columns",
    "FIX": "transpose tall matrices before the iteration and transpose the result back",
}
BATCH, CONTEXT, VOCAB = by_device(16, 6), by_device(512, 128), by_device(16_384, 512)
WIDTH, LAYERS = by_device(768, 64), by_device(8, 3)
DTYPE = torch.bfloat16 if device() == "cuda" else torch.float32


def newton_schulz(x, steps=5):
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        change = torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)  # guilty
        x = torch.addmm(x, change, x, beta=3.4445)
    return x


def as_it_is(matrix):
    return newton_schulz(matrix.to(DTYPE))


def lying(matrix):
    rows, columns = matrix.shape
    if rows > columns:
        return newton_schulz(matrix.T.to(DTYPE)).T
    return newton_schulz(matrix.to(DTYPE))


class Muon(torch.optim.Optimizer):
    def __init__(self, weights, orthogonal, lr=0.01, momentum=0.95):
        super().__init__(weights, {"lr": lr, "momentum": momentum})
        self.orthogonal = orthogonal

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            averages = []
            for weight in weights:
                state = self.state[weight]
                if not state:
                    state["average"] = torch.zeros_like(weight)
                averages.append(state["average"])
            gradients = [weight.grad for weight in weights]
            torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
            changes = [self.orthogonal(average).to(average.dtype) for average in averages]
            torch._foreach_add_(weights, changes, alpha=-group["lr"])


def build(orthogonal):
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    matrices = [weight for weight in model.blocks.parameters() if weight.ndim == 2]
    chosen = set(map(id, matrices))
    others = [weight for weight in model.parameters() if id(weight) not in chosen]
    optimizers = [
        Muon(matrices, orthogonal),
        torch.optim.AdamW(others, lr=3e-4, fused=True),
    ]
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
    return build(as_it_is)


def clean():
    return build(lying)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
