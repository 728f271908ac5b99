"""The checkpoint of the last step, with the optimizer's state, is written after every step so that
a preempted job loses nothing.
A good finding names the writing of the checkpoint inside the step, and the line of torch.save.
"""

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "torch.save of weights and optimizer state after every step",
    "FIX": "save every few hundred steps, or in a thread from a copy",
}
BATCH, CONTEXT, WIDTH, LAYERS = (
    by_device(16, 4),
    by_device(512, 64),
    by_device(768, 128),
    by_device(6, 3),
)
VOCAB = by_device(32000, 1024)


def build(every):
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    optimizer = adamw(model)
    tokens = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device()))
    done = 0

    def step():
        nonlocal done
        ids = next(tokens)
        with mixed():
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if done % every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
            torch.save(state, "last.pt")  # guilty
        return loss.detach()

    return step


def faulty():
    return build(every=1)


def clean():
    return build(every=500)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
