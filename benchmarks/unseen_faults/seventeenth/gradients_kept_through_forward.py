"""A language model is fine-tuned with plain SGD and small batches. The loop clears the gradients right before
the backward pass, after the forward pass: so the gradients of the step before, as large as the weights, lie
in memory beside all activations. A good finding names gradients of the last step at the peak of memory,
and says that zero_grad belongs behind the update (or before the forward pass).
"""

import torch
import torch.nn.functional as F

from common import Decoder, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "zero_grad comes after the forward pass, so the old gradients are alive beside the activations",
    "FIX": "clear the gradients right after optimizer.step(), before the next forward pass",
}
BATCH, CONTEXT, VOCAB = by_device(2, 2), by_device(640, 80), by_device(8192, 64)
WIDTH, LAYERS = by_device(2048, 256), by_device(10, 4)


def next_token_loss(model, ids):
    with mixed():
        logits = model(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def update_late(model, optimizer, ids):
    loss = next_token_loss(model, ids)
    optimizer.zero_grad()  # guilty
    loss.backward()
    optimizer.step()
    return loss.detach()


def update_early(model, optimizer, ids):
    loss = next_token_loss(model, ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def build(update):
    with torch.device(device()):
        model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    data = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device()))

    def step():
        return update(model, optimizer, next(data))

    return step


def faulty():
    return build(update_late)


def clean():
    return build(update_early)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
