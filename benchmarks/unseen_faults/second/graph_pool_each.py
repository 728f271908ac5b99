"""One CUDA graph of the whole step for each of four lengths. Own loop."""

import torch

from common import Decoder, adamw, device, main, next_token_loss, pick

FAULT = {
    "NAME": "graph_pool_each",
    "CAUSE": "Each of the four CUDA graphs is captured with a memory pool of its own, so the activations of all four lengths are reserved at once although one graph runs at a time.",
    "LINE": "# FAULT",
    "KIND": "memory",
    "FIX": "Capture the longest first and give the others its pool: torch.cuda.graph(graph, pool=first.pool()).",
    "STYLE": "loop",
    "WHY": "The private pools of the graphs add up; graphs that are never in flight together can share one pool, which then is as large as the longest length needs.",
    "GAIN_MS": None,
}
BATCH, VOCAB = pick(8, 2), pick(16384, 64)
LENGTHS = [pick(1024, 16), pick(896, 12), pick(768, 8), pick(640, 4)]


def make(private):
    dev = device()
    torch.manual_seed(0)
    model = Decoder(pick(1024, 32), pick(8, 1), VOCAB, LENGTHS[0]).to(dev)
    optimizer = adamw(model, capturable=dev == "cuda")
    static = {n: torch.randint(VOCAB, (BATCH, n + 1), device=dev) for n in LENGTHS}
    data = {n: torch.randint(VOCAB, (4, BATCH, n + 1), device=dev) for n in LENGTHS}
    losses, graphs, pool, count = {}, {}, None, 0

    def train(n):
        optimizer.zero_grad(set_to_none=True)
        loss = next_token_loss(model, static[n])
        loss.backward()
        optimizer.step()
        return loss.detach()

    if dev == "cuda":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                train(LENGTHS[0])
        torch.cuda.current_stream().wait_stream(side)
        for n in LENGTHS:
            graphs[n] = torch.cuda.CUDAGraph()
            optimizer.zero_grad(set_to_none=True)
            if private:
                with torch.cuda.graph(graphs[n]):  # FAULT
                    losses[n] = train(n)
            else:
                with torch.cuda.graph(graphs[n], pool=pool):
                    losses[n] = train(n)
                pool = graphs[n].pool()

    def step():
        nonlocal count
        n = LENGTHS[count % 4]
        static[n].copy_(data[n][count // 4 % 4])
        count += 1
        if not graphs:
            return train(n)
        graphs[n].replay()
        return losses[n]

    return step


def faulty():
    return make(private=True)


def clean():
    return make(private=False)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
