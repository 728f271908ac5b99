"""Muon for the attention's matrices and AdamW for the rest. Own loop."""

import torch

from common import Decoder, device, main, next_token_loss, pick

FAULT = {
    "NAME": "muon_in_fp32",
    "CAUSE": "The Newton-Schulz iteration of the optimizer runs in fp32, so its 15 matrix products per group do not use the bf16 tensor cores.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Cast the momentum to bf16 before the iteration, as Muon is meant to run: x = update.bfloat16().",
    "STYLE": "loop",
    "WHY": "The products of the update are fp32 and take several times as long as in bf16, for which the iteration's coefficients were made; autocast does not reach the optimizer.",
    "GAIN_MS": None,
}
BATCH, CONTEXT, VOCAB = pick(10, 2), pick(1024, 16), pick(16384, 64)


class Muon:
    def __init__(self, groups, wide):
        self.groups, self.wide = groups, wide
        self.momentum = [torch.stack([torch.zeros_like(p) for p in g]) for g in groups]

    def orthogonal(self, update):
        x = update if self.wide else update.bfloat16()
        if tall := x.shape[-2] > x.shape[-1]:
            x = x.mT
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        for _ in range(5):
            x = 3.4445 * x + (-4.7750 * (a := x @ x.mT) + 2.0315 * (a @ a)) @ x  # FAULT
        return x.mT if tall else x

    @torch.no_grad()
    def step(self):
        for group, momentum in zip(self.groups, self.momentum, strict=True):
            gradients = torch.stack([p.grad for p in group])
            momentum.lerp_(gradients, 0.05)
            update = self.orthogonal(gradients.lerp_(momentum, 0.95))
            torch._foreach_add_(group, list(update.to(momentum.dtype).unbind()), alpha=-0.01)


def make(wide):
    dev = device()
    torch.manual_seed(0)
    model = Decoder(pick(1024, 32), pick(8, 2), VOCAB, CONTEXT).to(dev)
    groups = [[b.qkv.weight for b in model.blocks], [b.proj.weight for b in model.blocks]]
    taken = {id(p) for group in groups for p in group}
    rest = [p for p in model.parameters() if id(p) not in taken]
    muon, adam = Muon(groups, wide), torch.optim.AdamW(rest, lr=3e-4, fused=True)
    data = torch.randint(VOCAB, (8, BATCH, CONTEXT + 1), device=dev)
    count = 0

    def step():
        nonlocal count
        loss = next_token_loss(model, data[count % 8])
        count += 1
        loss.backward()
        muon.step()
        adam.step()
        model.zero_grad()
        return loss.detach()

    return step


def faulty():
    return make(wide=True)


def clean():
    return make(wide=False)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
