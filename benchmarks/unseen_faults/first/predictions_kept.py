"""A loop that collects predictions for a metric at the end of the epoch. Own loop."""

import torch
import torch.nn.functional as F

from common import Decoder, adamw, device, main, pick

FAULT = {
    "NAME": "predictions_kept",
    "CAUSE": "The logits of every step are appended to a list for a metric at the end of the epoch, so GPU memory grows in every step.",
    "LINE": "# FAULT",
    "KIND": "memory",
    "FIX": "Keep only what the metric needs: add up the number of correct tokens on the device.",
    "STYLE": "loop",
}
BATCH, CONTEXT, VOCAB = pick(8, 2), pick(1024, 16), pick(16384, 64)


def make(keeps):
    dev = device()
    model = Decoder(pick(1024, 32), pick(6, 1), VOCAB, CONTEXT).to(dev)
    optimizer = adamw(model)
    data = torch.randint(VOCAB, (8, BATCH, CONTEXT + 1), device=dev)
    predictions, targets = [], []
    correct = torch.zeros((), dtype=torch.long, device=dev)
    count = 0

    def step():
        nonlocal count
        ids = data[count % 8]
        count += 1
        target = ids[:, 1:]
        with torch.autocast(dev, torch.bfloat16):
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        if keeps:
            predictions.append(logits)  # FAULT
            targets.append(target)
        else:
            correct.add_((logits.detach().argmax(-1) == target).sum())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main(faulty=lambda: make(True), clean=lambda: make(False))
