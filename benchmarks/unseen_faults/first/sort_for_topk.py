"""A language model that reports its top-5 accuracy with every step."""

import steplab
import torch
import torch.nn.functional as F

from common import Decoder, adamw, my_turn, pick, token_batches

FAULT = {
    "NAME": "sort_for_topk",
    "CAUSE": "The top-5 accuracy sorts the logits of the whole vocabulary for every token, only to look at the first five.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Count how many logits exceed that of the target: one pass, no sort (or compute the metric every 100 steps).",
    "STYLE": "factory",
    "BATCH": 8,
}
WIDTH, LAYERS, VOCAB, CONTEXT = pick(1024, 32), pick(6, 1), pick(16384, 64), pick(1024, 16)


def top5_by_sorting(logits, target):
    order = logits.argsort(dim=-1, descending=True)  # FAULT
    return (order[:, :5] == target[:, None]).any(dim=-1).float().mean()


def top5_by_rank(logits, target):
    rank = (logits > logits.gather(1, target[:, None])).sum(dim=-1)
    return (rank < 5).float().mean()


def make(top5):
    def loss(model, ids):
        target = ids[:, 1:].flatten()
        with torch.autocast(ids.device.type, torch.bfloat16):
            logits = model(ids[:, :-1]).flatten(0, 1)
            value = F.cross_entropy(logits, target)
        return steplab.StepOutput(value, {"top5": top5(logits.detach(), target)})

    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT)
    my_turn()
    return steplab.UserModel(
        model=model,
        batches=token_batches(VOCAB, CONTEXT),
        loss=loss,
        optimizer=adamw,
        tokens_per_sequence=CONTEXT,
    )


def faulty():
    return make(top5_by_sorting)


def clean():
    return make(top5_by_rank)
