"""Tokens from a DataLoader with workers. Own loop."""

import torch
from torch.utils.data import DataLoader, Dataset

from common import Decoder, adamw, device, main, next_token_loss, pick

FAULT = {
    "NAME": "loader_reborn",
    "CAUSE": "next(iter(loader)) in the step makes a new iterator every time, so the DataLoader starts its worker processes anew and throws away what they prefetched.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Make the iterator once, outside the step, and start it again only when it ends.",
    "STYLE": "loop",
}
BATCH, CONTEXT, VOCAB = pick(8, 2), pick(1024, 32), pick(8192, 64)


class Windows(Dataset):
    """Windows of one long series of tokens."""

    def __init__(self):
        self.tokens = torch.randint(VOCAB, (pick(4_000_000, 20_000),))

    def __len__(self):
        return len(self.tokens) // (CONTEXT + 1)

    def __getitem__(self, index):
        start = index * (CONTEXT + 1)
        return self.tokens[start : start + CONTEXT + 1]


def make(reborn):
    dev = device()
    model = Decoder(pick(1024, 32), pick(8, 1), VOCAB, CONTEXT).to(dev)
    optimizer = adamw(model)
    loader = DataLoader(
        Windows(),
        batch_size=BATCH,
        shuffle=True,
        num_workers=pick(4, 1),
        pin_memory=dev == "cuda",
        drop_last=True,
    )

    def endless():
        while True:
            yield from loader

    stream = endless()

    def step():
        if reborn:
            ids = next(iter(loader))  # FAULT
        else:
            ids = next(stream)
        loss = next_token_loss(model, ids.to(dev, non_blocking=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main(faulty=lambda: make(True), clean=lambda: make(False))
