"""A CUDA graph of the whole step, fed with batches that the same thread packs. Own loop."""

import numpy as np
import torch

from common import Decoder, adamw, device, main, next_token_loss, pick

FAULT = {
    "NAME": "replay_then_item",
    "CAUSE": "The loss is read with .item() right after every replay, so the next batch is packed only after the device has finished, while the device idles.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Add the loss up on the device and read it every 100 steps; the next batch is then packed while the graph runs.",
    "STYLE": "loop",
    "WHY": "The replay returns at once, but .item() makes the host wait for the whole step, and the packing of the next batch, which would hide behind the graph, becomes idle time of the device.",
    "GAIN_MS": None,
}
BATCH, CONTEXT, VOCAB = pick(12, 2), pick(1024, 16), pick(16384, 64)
TEXTS, CHUNK = pick(4096, 64), 4


def packer():
    draw = np.random.default_rng(0)
    texts = [draw.integers(VOCAB, size=CHUNK) for _ in range(TEXTS)]
    need = BATCH * (CONTEXT + 1)

    def pack():
        parts, size = [], 0
        while size < need:
            text = texts[draw.integers(TEXTS)]
            parts.append(text)
            size += len(text)
        return torch.from_numpy(np.concatenate(parts)[:need]).view(BATCH, CONTEXT + 1)

    return pack


def make(reads):
    dev = device()
    torch.manual_seed(0)
    model = Decoder(pick(1024, 32), pick(8, 1), VOCAB, CONTEXT).to(dev)
    optimizer = adamw(model, capturable=dev == "cuda")
    ids = torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=dev)
    total, graph, loss, count = torch.zeros((), device=dev), None, None, 0
    history, pack = [], packer()

    def train():
        optimizer.zero_grad(set_to_none=True)
        loss = next_token_loss(model, ids)
        loss.backward()
        optimizer.step()
        return loss.detach()

    if dev == "cuda":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                train()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            loss = train()

    def step():
        nonlocal count, loss
        count += 1
        batch = pack()
        ids.copy_(batch.pin_memory() if dev == "cuda" else batch, non_blocking=True)
        if graph is None:
            loss = train()
        else:
            graph.replay()
        if reads:
            history.append(loss.item())  # FAULT
        else:
            total.add_(loss)
            if count % 100 == 0:
                history.append(total.item() / 100)
                total.zero_()
        return loss

    return step


def faulty():
    return make(reads=True)


def clean():
    return make(reads=False)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
