"""The loop clears the gradients right before backward, as many tutorials do. So the gradients of
the last step, as large as all weights, lie in memory during the whole forward, while the
activations pile up beside them. Cleared right after the update they would never meet.
A good finding names the old gradients that are alive during the forward, and the line of zero_grad
(or of the update after which it belongs).
"""

import torch
import torch.nn.functional as F

from common import Decoder, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "gradients of the last step stay alive during the forward because zero_grad is called right before backward",
    "FIX": "optimizer.zero_grad() right after optimizer.step()",
}
BATCH, TIME, VOCAB = by_device(2, 2), by_device(1024, 64), by_device(8192, 256)
WIDTH, LAYERS = by_device(2048, 256), by_device(12, 3)


def prepare():
    with torch.device(device()):
        model = Decoder(WIDTH, LAYERS, VOCAB, TIME)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, fused=True)
    data = in_turn(lambda: torch.randint(VOCAB, (BATCH, TIME + 1), device=device()))
    return model, optimizer, data


def objective(model, ids):
    with mixed():
        logits = model(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def faulty():
    model, optimizer, data = prepare()

    def step():
        loss = objective(model, next(data))
        optimizer.zero_grad()  # guilty
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def clean():
    model, optimizer, data = prepare()

    def step():
        loss = objective(model, next(data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
