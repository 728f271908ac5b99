"""A language model for music logs the mean entropy of its predictions every fifty steps. In each step
the entropy is computed from the logits and appended to a list, without `detach()`. No backward pass
goes through it, so the list keeps the graph of each entropy, with log probabilities and
probabilities over the whole vocabulary, until the list is emptied.
A good finding names the memory that grows from step to step, kept by the entropies in the list, and
the line.
"""

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "entropies are appended to a list with their graphs, which keep tensors over the whole vocabulary for fifty steps",
    "FIX": "append entropy.detach(), or compute it under torch.no_grad()",
}
BATCH, CONTEXT, VOCAB = by_device(16, 4), by_device(512, 96), by_device(4096, 768)
WIDTH, LAYERS, EVERY = by_device(512, 64), by_device(8, 2), 50


def entropy_of(logits):
    log_p = logits.float().log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1).mean()


def build(keep):
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    optimizer = adamw(model)
    data = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device()))
    entropies, logged = [], []

    def step():
        ids = next(data)
        with mixed():
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        if keep:
            entropies.append(entropy_of(logits))  # guilty
        else:
            with torch.no_grad():
                entropies.append(entropy_of(logits))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if len(entropies) == EVERY:
            logged.append(torch.stack(entropies).mean().item())
            entropies.clear()
        return loss.detach()

    return step


def faulty():
    return build(keep=True)


def clean():
    return build(keep=False)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
