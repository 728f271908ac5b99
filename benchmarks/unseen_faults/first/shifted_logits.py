"""A causal language model in the manner of Hugging Face: forward(input_ids, labels) returns a loss."""

import steplab
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from common import Decoder, adamw, device, my_turn, pick

FAULT = {
    "NAME": "shifted_logits",
    "CAUSE": "The logits of the whole vocabulary are cast to fp32 and copied once more by shifting them for the labels, so several copies of the largest tensor of the step are alive at its peak.",
    "LINE": "# FAULT",
    "KIND": "memory",
    "FIX": "Shift the hidden states instead and compute head and cross-entropy in chunks that are recomputed in backward.",
    "STYLE": "factory",
    "BATCH": 8,
}
WIDTH, LAYERS, VOCAB, CONTEXT = pick(1024, 32), pick(4, 1), pick(50304, 64), pick(1024, 16)


class CausalLM(Decoder):
    def forward(self, input_ids, labels):
        hidden = self.hidden(input_ids)
        logits = self.head(hidden).float()
        shift_logits = logits[..., :-1, :].contiguous()  # FAULT
        shift_labels = labels[..., 1:].contiguous()
        loss = F.cross_entropy(shift_logits.view(-1, VOCAB), shift_labels.view(-1))
        return {"loss": loss}


class FrugalCausalLM(Decoder):
    def chunk_loss(self, hidden, labels):
        return F.cross_entropy(self.head(hidden), labels, reduction="sum")

    def forward(self, input_ids, labels):
        hidden = self.hidden(input_ids)[:, :-1].flatten(0, 1)
        target = labels[:, 1:].flatten()
        total = sum(
            checkpoint(self.chunk_loss, h, t, use_reentrant=False)
            for h, t in zip(hidden.chunk(8), target.chunk(8), strict=True)
        )
        return {"loss": total / target.numel()}


def batches(size):
    ready = [torch.randint(VOCAB, (size, CONTEXT), device=device()) for _ in range(4)]
    while True:
        for ids in ready:
            yield {"input_ids": ids, "labels": ids}


def loss(model, batch):
    with torch.autocast(batch["input_ids"].device.type, torch.bfloat16):
        return model(**batch)


def make(kind):
    model = kind(WIDTH, LAYERS, VOCAB, CONTEXT)
    my_turn()
    return steplab.UserModel(
        model=model, batches=batches, loss=loss, optimizer=adamw, tokens_per_sequence=CONTEXT
    )


def faulty():
    return make(CausalLM)


def clean():
    return make(FrugalCausalLM)
