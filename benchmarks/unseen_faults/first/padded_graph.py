"""Sentences of many lengths through CUDA graphs of fixed sizes. Own loop."""

import torch

from common import Decoder, device, main, next_token_loss, pick

FAULT = {
    "NAME": "padded_graph",
    "CAUSE": "There is one graph, captured for the longest sequence, so every shorter batch is padded to twice its length and most of the computation is on padding.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Capture a graph for each of a few bucket lengths and replay the shortest that fits.",
    "STYLE": "loop",
}
BATCH, LONGEST, VOCAB = pick(16, 2), pick(1024, 32), pick(8192, 64)
LENGTHS = [LONGEST // 2, LONGEST // 2 - 3, LONGEST // 2 - 7, LONGEST // 2 - 1]


class Graphs:
    """One captured training step per bucket."""

    def __init__(self, buckets):
        self.dev = device()
        self.on_cuda = self.dev == "cuda"
        self.buckets = buckets
        self.model = Decoder(pick(768, 32), pick(12, 1), VOCAB, LONGEST).to(self.dev)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=3e-4, fused=True, capturable=self.on_cuda
        )
        self.data = [
            torch.randint(VOCAB, (BATCH, length + 1), device=self.dev) for length in LENGTHS
        ]
        self.count = 0
        self.inputs = {
            b: torch.zeros(BATCH, b + 1, dtype=torch.long, device=self.dev) for b in buckets
        }
        self.graphs = {b: self.capture(b) for b in buckets} if self.on_cuda else {}

    def work(self, bucket):
        self.optimizer.zero_grad(set_to_none=True)
        next_token_loss(self.model, self.inputs[bucket]).backward()
        self.optimizer.step()

    def capture(self, bucket):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.work(bucket)
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.work(bucket)
        return graph

    def __call__(self):
        ids = self.data[self.count % len(self.data)]
        self.count += 1
        bucket = min(b for b in self.buckets if b + 1 >= ids.shape[1])
        self.inputs[bucket].zero_()
        self.inputs[bucket][:, : ids.shape[1]].copy_(ids)
        if self.on_cuda:
            self.graphs[bucket].replay()
        else:
            self.work(bucket)


def faulty():
    return Graphs([LONGEST])  # FAULT


def clean():
    return Graphs([LONGEST // 4, LONGEST // 2, LONGEST])


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
