"""A language model is trained on preferences with DPO against its frozen first version. To watch it,
the ratio of the gradient's norm to the weight's is logged for each of 149 parameters in every step, each
computed by itself and read with .item(), which waits for the GPU 149 times.
A good finding names the .item() in the loop over parameters. (On a CPU the effect is small.)
"""

import collections
import copy

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the ratios of gradient to weight are computed and read with .item() parameter by parameter",
    "FIX": "take all norms with torch._foreach_norm, keep them on the device and read them every ten steps",
}
PAIRS, CONTEXT, VOCAB = by_device(12, 3), by_device(512, 48), by_device(16_384, 64)
WIDTH, LAYERS, BETA = by_device(512, 64), by_device(12, 12), 0.1


class OneByOne:
    def __init__(self, model):
        self.model = model
        self.log = collections.deque(maxlen=100)

    def record(self):
        ratios = {}
        for name, p in self.model.named_parameters():
            ratios[name] = (p.grad.norm() / p.detach().norm()).item()  # guilty
        self.log.append(ratios)


class AtOnce:
    def __init__(self, model):
        self.names, self.weights = zip(*model.named_parameters(), strict=False)
        self.log, self.unread = collections.deque(maxlen=100), []

    @torch.no_grad()
    def record(self):
        gradients = torch.stack(torch._foreach_norm([p.grad for p in self.weights]))
        self.unread.append(gradients / torch.stack(torch._foreach_norm(self.weights)))
        if len(self.unread) == 10:
            for ratios in torch.stack(self.unread).tolist():
                self.log.append(dict(zip(self.names, ratios, strict=False)))
            self.unread = []


def log_probs(model, ids):
    logits = model(ids[:, :-1])
    targets = ids[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return -losses.view_as(targets).sum(1)


def build(watch):
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer, watched = adamw(model), watch(model)
    data = in_turn(lambda: torch.randint(VOCAB, (2 * PAIRS, CONTEXT + 1), device=device()))

    def step():
        ids = next(data)
        with mixed():
            with torch.no_grad():
                before = log_probs(reference, ids)
            chosen, rejected = (log_probs(model, ids) - before).chunk(2)
        loss = -F.logsigmoid(BETA * (chosen - rejected)).mean()
        loss.backward()
        watched.record()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(OneByOne)


def clean():
    return build(AtOnce)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
