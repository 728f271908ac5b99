"""A language model for log lines is trained, and at the end of an epoch the script prints how often the
right token was among its first five. For that each step's logits are put into a list, one number per
token of the vocabulary at every position, and judged together after the last step. The list grows by
the largest tensor of the model in each step. Counting the hits at once leaves a single number.
A good finding names the logits kept from step to step, and the line that puts them into the list.
"""

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "each step's logits stay in a list until the epoch's accuracy is computed",
    "FIX": "count the hits of the step at once and keep the count",
}
BATCH, CONTEXT, VOCAB = by_device(4, 4), by_device(512, 48), by_device(16_384, 6000)
WIDTH, LAYERS, EPOCH, FIRST = by_device(384, 64), by_device(4, 2), 400, 5


class KeepsLogits:
    def __init__(self):
        self.seen = []

    def add(self, logits, labels):
        self.seen.append((logits.detach(), labels))  # guilty

    def result(self):
        told = torch.cat([logits.topk(FIRST).indices for logits, _ in self.seen])
        truth = torch.cat([labels for _, labels in self.seen])
        self.seen = []
        return (told == truth[:, None]).any(1).float().mean().item()


class CountsHits:
    def __init__(self):
        self.hits, self.count = torch.zeros((), device=device()), 0

    def add(self, logits, labels):
        told = logits.detach().topk(FIRST).indices
        self.hits += (told == labels[:, None]).sum()
        self.count += len(labels)

    def result(self):
        share = (self.hits / self.count).item()
        self.hits, self.count = torch.zeros((), device=device()), 0
        return share


def train(metric):
    torch.manual_seed(0)
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    updates, done = adamw(model), 0
    stream = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device()))

    def step():
        nonlocal done
        ids = next(stream)
        labels = ids[:, 1:].flatten()
        with mixed():
            logits = model(ids[:, :-1]).flatten(0, 1)
            loss = F.cross_entropy(logits, labels)
        loss.backward()
        updates.step()
        updates.zero_grad()
        metric.add(logits, labels)
        done += 1
        if done % EPOCH == 0:
            print(f"top-{FIRST} accuracy of the epoch: {metric.result():.4f}")
        return loss.detach()

    return step


def faulty():
    return train(KeepsLogits())


def clean():
    return train(CountsHits())


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
