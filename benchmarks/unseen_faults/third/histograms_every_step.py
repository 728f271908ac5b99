"""A hook on every parameter makes a histogram of its gradient in every backward pass, as a tracker's
`watch(model)` does when its frequency is set to 1.
A good finding names the histograms of all gradients, and the line in the hook that makes them.
"""

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "gradient hooks make a histogram of every gradient in every step",
    "FIX": "make them every few hundred steps, when they are written",
}
BATCH, CONTEXT, WIDTH, LAYERS = (
    by_device(16, 2),
    by_device(512, 64),
    by_device(768, 192),
    by_device(6, 3),
)
VOCAB = by_device(32000, 2048)


class Watch:
    def __init__(self, model, every):
        self.every, self.step, self.histograms = every, 0, {}
        for name, p in model.named_parameters():
            p.register_hook(self.log(name))

    def log(self, name):
        def hook(gradient):
            if self.step % self.every == 0:
                self.histograms[name] = torch.histc(gradient.float(), bins=64)  # guilty

        return hook


def build(every):
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    watch, optimizer = Watch(model, every), adamw(model)
    tokens = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device()))

    def step():
        ids = next(tokens)
        watch.step += 1
        with mixed():
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(every=1)


def clean():
    return build(every=500)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
