"""A language model learns to summarize: each row is a document with a summary of fixed length behind
it, and the labels of the document are -100. The head computes logits over the whole vocabulary
for the document too, and cross_entropy leaves them out. The states of the summary can be cut out
before the head.
A good finding names the logits of positions whose label is ignored and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import Block, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the head computes logits for the document, whose labels are -100",
    "FIX": "give the head the states of the summary alone",
}
BATCH, DOCUMENT, SUMMARY = by_device(16, 4), by_device(896, 112), by_device(128, 16)
WIDTH, LAYERS, VOCAB = by_device(512, 64), by_device(6, 2), by_device(50_304, 4096)
CONTEXT = DOCUMENT + SUMMARY


class SummaryModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.ModuleList(Block(WIDTH, WIDTH // 64) for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)

    def forward(self, input_ids):
        hidden_states = self.wte(input_ids) + self.wpe.weight
        for block in self.h:
            hidden_states = block(hidden_states)
        return hidden_states


class SummaryForCausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = SummaryModel()
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids, labels, logits_to_keep=CONTEXT):
        hidden_states = self.transformer(input_ids)[:, -logits_to_keep:]
        logits = self.lm_head(self.transformer.ln_f(hidden_states))  # guilty
        wanted = labels[:, -logits_to_keep:]
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100)


def build(**how):
    model = SummaryForCausalLM().to(device())
    optimizer = adamw(model)

    def collate():
        ids = torch.randint(VOCAB, (BATCH, CONTEXT + 1), device=device())
        labels = ids[:, 1:].clone()
        labels[:, :DOCUMENT] = -100
        return {"input_ids": ids[:, :-1], "labels": labels}

    data = in_turn(collate)

    def step():
        with mixed():
            loss = model(**next(data), **how)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build()


def clean():
    return build(logits_to_keep=SUMMARY)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
