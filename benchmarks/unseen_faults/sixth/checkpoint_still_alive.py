"""Training continues from a checkpoint. Weights are copied from it into the model, the moments of the
old optimizer are not wanted, but the whole checkpoint stays alive because the step reads its number
of steps.
A good finding names the memory of weights and moments that nothing reads, and the line that loads
the checkpoint.
"""

import os
import tempfile

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "memory",
    "STYLE": "loop",
    "CAUSE": "the loaded checkpoint, with weights and moments, stays alive during the whole training",
    "FIX": "take the number of steps out of it and delete it",
}
BATCH, CONTEXT, WIDTH, LAYERS = (
    by_device(4, 1),
    by_device(256, 32),
    by_device(1024, 384),
    by_device(12, 4),
)
VOCAB = by_device(16_384, 1000)


def write(path):
    old = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT)
    state = {"weights": old.state_dict(), "step": 1000}
    for name in ("first", "second"):
        state[name] = {k: torch.zeros_like(v) for k, v in old.state_dict().items()}
    torch.save(state, path)


def prepare():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "last.pt")
        write(path)
        checkpoint = torch.load(path, map_location=device())  # guilty
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    model.load_state_dict(checkpoint["weights"])
    tokens = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device()))
    return model, adamw(model), tokens, checkpoint


def update(model, optimizer, ids):
    with mixed():
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, optimizer, tokens, checkpoint = prepare()
    log = {"done": 0}

    def step():
        log["done"] += 1
        log["step"] = checkpoint["step"] + log["done"]
        return update(model, optimizer, next(tokens))

    return step


def clean():
    model, optimizer, tokens, checkpoint = prepare()
    log = {"done": 0, "before": checkpoint["step"]}
    del checkpoint

    def step():
        log["done"] += 1
        log["step"] = log["before"] + log["done"]
        return update(model, optimizer, next(tokens))

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
