"""The captions are known in training, but the loop calls the causal decoder once per position, on
the prefix up to there, as if it were generating, and takes the logits of the last token.
A good finding names the decoder that runs again on every growing prefix, and the line.
"""

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the causal decoder runs once per position on the known prefix instead of once in all",
    "FIX": "call the decoder once on the whole text; the causal mask hides what comes later",
}
BATCH, TIME, VOCAB = by_device(32, 32), by_device(48, 10), by_device(4096, 512)
WIDTH, LAYERS = by_device(512, 128), by_device(6, 2)


def prepare():
    model = Decoder(WIDTH, LAYERS, VOCAB, TIME).to(device())
    data = in_turn(lambda: torch.randint(VOCAB, (BATCH, TIME + 1), device=device()))
    return model, adamw(model), data


def update(optimizer, logits, targets):
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, optimizer, data = prepare()

    def step():
        text = next(data)
        logits = []
        with mixed():
            for t in range(1, TIME + 1):
                logits.append(model(text[:, :t])[:, -1])  # guilty
        return update(optimizer, torch.stack(logits, 1), text[:, 1:])

    return step


def clean():
    model, optimizer, data = prepare()

    def step():
        text = next(data)
        with mixed():
            logits = model(text[:, :-1])
        return update(optimizer, logits, text[:, 1:])

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
