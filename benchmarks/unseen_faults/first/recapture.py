"""A training step in a CUDA graph of one's own, with a learning-rate schedule. Own loop."""

import torch

from common import Decoder, device, main, next_token_loss, pick

FAULT = {
    "NAME": "recapture",
    "CAUSE": "The learning rate is a Python number that is frozen in the captured graph, so the graph is captured again in every step because the schedule changes it.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Make the learning rate a tensor on the device and write the schedule's value into it before the replay.",
    "STYLE": "loop",
}
BATCH, CONTEXT, VOCAB = pick(8, 2), pick(512, 16), pick(8192, 64)


class GraphedStep:
    """Forward, backward and update in one graph; eager where there is no CUDA."""

    def __init__(self, lr_as_tensor):
        self.dev = device()
        self.on_cuda = self.dev == "cuda"
        self.model = Decoder(pick(768, 32), pick(12, 1), VOCAB, CONTEXT).to(self.dev)
        self.lr_as_tensor = lr_as_tensor
        lr = torch.tensor(3e-4, device=self.dev) if lr_as_tensor else 3e-4
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=lr, fused=True, capturable=self.on_cuda
        )
        self.ids = torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=self.dev)
        self.count, self.graph = 0, None
        if self.on_cuda:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.work()
            torch.cuda.current_stream().wait_stream(side)

    def work(self):
        self.optimizer.zero_grad(set_to_none=True)
        next_token_loss(self.model, self.ids).backward()
        self.optimizer.step()

    def capture(self):
        self.optimizer.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.work()

    def __call__(self):
        self.count += 1
        lr = 3e-4 * min(1.0, self.count / 1000)
        group = self.optimizer.param_groups[0]
        if self.lr_as_tensor:
            group["lr"].fill_(lr)
        else:
            group["lr"], self.graph = lr, None
        if not self.on_cuda:
            return self.work()
        if self.graph is None:
            self.capture()  # FAULT
        self.graph.replay()


if __name__ == "__main__":
    main(faulty=lambda: GraphedStep(False), clean=lambda: GraphedStep(True))
