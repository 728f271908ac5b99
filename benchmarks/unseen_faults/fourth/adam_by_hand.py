"""The optimizer is Adam as the paper's pseudocode has it, written with tensors of their own for
every moment, its correction, the denominator and the update.
A good finding names the elementwise work of the update, which a fused optimizer does in one pass,
and a line of it.
"""

import torch
import torch.nn.functional as F

from common import Decoder, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "Adam is written by hand: a dozen elementwise operators per weight tensor, most of them with new memory",
    "FIX": "torch.optim.Adam(fused=True)",
}
BATCH, CONTEXT, WIDTH, LAYERS = (
    by_device(8, 4),
    by_device(512, 32),
    by_device(1024, 256),
    by_device(12, 2),
)
VOCAB = by_device(16_384, 2000)
RATE, BETA1, BETA2, EPS = 3e-4, 0.9, 0.999, 1e-8


class PaperAdam:
    def __init__(self, parameters):
        self.parameters, self.t = list(parameters), 0
        self.m = [torch.zeros_like(p) for p in self.parameters]
        self.v = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def step(self):
        self.t += 1
        for i, p in enumerate(self.parameters):
            self.m[i] = BETA1 * self.m[i] + (1 - BETA1) * p.grad
            self.v[i] = BETA2 * self.v[i] + (1 - BETA2) * p.grad**2  # guilty
            m_hat = self.m[i] / (1 - BETA1**self.t)
            v_hat = self.v[i] / (1 - BETA2**self.t)
            p -= RATE * m_hat / (torch.sqrt(v_hat) + EPS)

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None


def build(optimize):
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    optimizer = optimize(model.parameters())
    tokens = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device()))

    def step():
        ids = next(tokens)
        with mixed():
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(PaperAdam)


def clean():
    return build(
        lambda ps: torch.optim.Adam(ps, lr=RATE, betas=(BETA1, BETA2), eps=EPS, fused=True)
    )


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
