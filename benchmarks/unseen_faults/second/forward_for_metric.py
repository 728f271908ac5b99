"""A language model with outputs as in Hugging Face's library, and an accuracy. Own loop."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from common import Decoder, adamw, device, main, pick

FAULT = {
    "NAME": "forward_for_metric",
    "CAUSE": "The model is called once for its loss and once more, on the same batch, for the logits of the accuracy.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Keep the output of the first call: output.loss and output.logits.",
    "STYLE": "loop",
    "WHY": "Two equal forward passes over the same ids in every step; the second only serves the accuracy, which the logits of the first would give.",
    "GAIN_MS": None,
}
BATCH, CONTEXT, VOCAB = pick(10, 2), pick(1024, 16), pick(16384, 64)


@dataclass
class Output:
    loss: torch.Tensor | None
    logits: torch.Tensor


class CausalLm(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = Decoder(pick(1024, 32), pick(8, 1), VOCAB, CONTEXT)

    def forward(self, input_ids, labels=None):
        logits = self.transformer(input_ids)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Output(loss, logits)


def make(twice):
    dev = device()
    torch.manual_seed(0)
    model = CausalLm().to(dev)
    optimizer = adamw(model)
    data = torch.randint(VOCAB, (8, BATCH, CONTEXT + 1), device=dev)
    correct, count = torch.zeros((), device=dev), 0

    def step():
        nonlocal count
        ids, labels = data[count % 8, :, :-1], data[count % 8, :, 1:]
        count += 1
        with torch.autocast(dev, torch.bfloat16):
            output = model(ids, labels=labels)
            if twice:
                logits = model(ids).logits  # FAULT
            else:
                logits = output.logits
        correct.add_((logits.detach().argmax(-1) == labels).float().mean())
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return output.loss.detach()

    return step


def faulty():
    return make(twice=True)


def clean():
    return make(twice=False)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
