"""A loop that tidies up after every step. Own loop."""

import torch

from common import Decoder, adamw, device, main, next_token_loss, pick

FAULT = {
    "NAME": "empty_cache",
    "CAUSE": "torch.cuda.empty_cache() after every step gives all cached memory back to the driver, so the next step must allocate it again with slow, synchronizing driver calls.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Remove the call: the caching allocator reuses the memory by itself.",
    "STYLE": "loop",
}
BATCH, CONTEXT, VOCAB = pick(8, 2), pick(1024, 16), pick(8192, 64)


def make(tidies):
    dev = device()
    model = Decoder(pick(1024, 32), pick(8, 1), VOCAB, CONTEXT).to(dev)
    optimizer = adamw(model)
    data = torch.randint(VOCAB, (8, BATCH, CONTEXT + 1), device=dev)
    count = 0

    def step():
        nonlocal count
        loss = next_token_loss(model, data[count % 8])
        count += 1
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if tidies:
            torch.cuda.empty_cache()  # FAULT

    return step


if __name__ == "__main__":
    main(faulty=lambda: make(True), clean=lambda: make(False))
