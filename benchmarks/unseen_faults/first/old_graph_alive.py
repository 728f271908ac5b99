"""A loop with two losses on one trunk. Own loop."""

import torch
import torch.nn.functional as F
from torch import nn

from common import Decoder, adamw, device, main, pick

FAULT = {
    "NAME": "old_graph_alive",
    "CAUSE": "backward(retain_graph=True) with the loss kept for logging holds all activations of a step until the loss of the next one replaces it, so two steps' activations are in memory at once.",
    "LINE": "# FAULT",
    "KIND": "memory",
    "FIX": "Drop retain_graph, which nothing needs since both losses are in one backward, and keep loss.detach().",
    "STYLE": "loop",
}
BATCH, CONTEXT, VOCAB = pick(8, 2), pick(1024, 16), pick(8192, 64)
WIDTH, LAYERS = pick(1024, 32), pick(8, 1)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT)
        self.value = nn.Linear(WIDTH, 1)

    def forward(self, ids):
        hidden = self.trunk.hidden(ids)
        return self.trunk.head(hidden), self.value(hidden).squeeze(-1)


class Trainer:
    def __init__(self, retains):
        self.retains = retains
        self.dev = device()
        self.model = TwoHeads().to(self.dev)
        self.optimizer = adamw(self.model)
        self.ids = torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=self.dev)
        self.returns = torch.randn(BATCH, CONTEXT, device=self.dev)
        self.last_loss = None

    def __call__(self):
        with torch.autocast(self.dev, torch.bfloat16):
            logits, value = self.model(self.ids[:, :-1])
            policy_loss = F.cross_entropy(logits.flatten(0, 1), self.ids[:, 1:].flatten())
            value_loss = F.mse_loss(value.float(), self.returns)
        loss = policy_loss + 0.5 * value_loss
        if self.retains:
            loss.backward(retain_graph=True)  # FAULT
            self.last_loss = loss
        else:
            loss.backward()
            self.last_loss = loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()


if __name__ == "__main__":
    main(faulty=lambda: Trainer(True), clean=lambda: Trainer(False))
