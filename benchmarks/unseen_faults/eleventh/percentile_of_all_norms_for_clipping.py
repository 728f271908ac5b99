"""A small language model whose gradients are clipped at the 10th percentile of all gradient norms so far.
The norms are in a list, and np.percentile goes through the whole list in every step.
A good finding names the percentile of the whole history that every step computes, and its line.
"""

import bisect

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the clipping threshold is np.percentile of a list of all gradient norms since the first step",
    "FIX": "keep the norms sorted with bisect.insort, or use a window of the last norms",
}
BATCH, CONTEXT, VOCAB = by_device(16, 4), by_device(512, 64), 256
WIDTH, LAYERS = by_device(512, 128), by_device(8, 2)
STEPS_BEFORE, PERCENT = 150000, 10


class AutoClip:
    """Clip gradients at a percentile of the norms so far; the norms of a resumed run are known."""

    def __init__(self, norms):
        self.norms = norms

    def threshold(self, norm):
        self.norms.append(norm)
        return float(np.percentile(self.norms, PERCENT))  # guilty

    def __call__(self, parameters):
        gradients = [p.grad for p in parameters]
        norm = nn.utils.get_total_norm(gradients)
        nn.utils.clip_grads_with_norm_(parameters, self.threshold(norm.item()), norm)


class AutoClipSorted(AutoClip):
    def __init__(self, norms):
        super().__init__(sorted(norms))

    def threshold(self, norm):
        bisect.insort(self.norms, norm)
        place = (len(self.norms) - 1) * PERCENT / 100
        low = int(place)
        return self.norms[low] + (self.norms[low + 1] - self.norms[low]) * (place - low)


def training(auto_clip):
    torch.manual_seed(0)
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    optimizer = adamw(model)
    data = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device()))
    parameters = list(model.parameters())
    clip = auto_clip(np.random.default_rng(0).lognormal(size=STEPS_BEFORE).tolist())

    def step():
        ids = next(data)
        with mixed():
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        clip(parameters)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return training(AutoClip)


def clean():
    return training(AutoClipSorted)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
