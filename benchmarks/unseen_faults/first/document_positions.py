"""Positions that start again at every document, for packed sequences. Own loop."""

import torch
import torch.nn.functional as F

from common import Decoder, adamw, device, main, pick

FAULT = {
    "NAME": "document_positions",
    "CAUSE": "Positions and loss weights of packed documents are computed token by token in Python on the host in every step, so the GPU waits for the interpreter.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Compute them on the GPU with cumsum and cummax over the end-of-document tokens.",
    "STYLE": "loop",
}
BATCH, CONTEXT = pick(32, 2), pick(1024, 32)
WIDTH, LAYERS, VOCAB, EOS = pick(512, 32), pick(3, 1), pick(4096, 64), 0


def positions_in_python(ids):
    positions = []
    for row in ids.tolist():
        since, out = 0, []
        for token in row:  # FAULT
            out.append(since)
            since = 0 if token == EOS else since + 1
        positions.append(out)
    weights = [[1.0 / (1.0 + p) for p in row] for row in positions]
    return torch.tensor(positions), torch.tensor(weights)


def positions_on_device(ids):
    index = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    starts = torch.zeros_like(ids)
    starts[:, 1:] = torch.where(ids[:, :-1] == EOS, index[:, 1:], 0)
    positions = index - starts.cummax(dim=1).values
    return positions, 1.0 / (1.0 + positions)


class Packed(Decoder):
    def forward(self, ids, positions):
        x = self.tokens(ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make(in_python):
    dev = device()
    model = Packed(WIDTH, LAYERS, VOCAB, CONTEXT).to(dev)
    optimizer = adamw(model)
    data = [torch.randint(VOCAB, (BATCH, CONTEXT + 1)) for _ in range(4)]
    for ids in data:
        ids[torch.rand(ids.shape) < 0.01] = EOS
    pinned = [ids.pin_memory() if dev == "cuda" else ids for ids in data]
    count = 0

    def step():
        nonlocal count
        host = pinned[count % 4]
        count += 1
        ids = host.to(dev, non_blocking=True)
        if in_python:
            positions, weights = positions_in_python(host[:, :-1])
            positions, weights = positions.to(dev), weights.to(dev)
        else:
            positions, weights = positions_on_device(ids[:, :-1])
        with torch.autocast(dev, torch.bfloat16):
            logits = model(ids[:, :-1], positions)
            losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = (losses * weights.flatten()).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main(faulty=lambda: make(True), clean=lambda: make(False))
