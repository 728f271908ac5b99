"""Only the two upper layers of a BERT and its classifier are trained. The ten lower layers are
frozen, but the embeddings below them were forgotten: they still require a gradient, so the backward
goes through all frozen layers down to them, and the optimizer does not even have them.
A good finding names the backward through the frozen layers (or the embeddings' gradient that nobody
uses), and the line that freezes, makes the optimizer or runs the backward.
"""

import torch
from transformers import BertConfig, BertForSequenceClassification

from common import by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the embeddings still require gradients, so the backward goes through all frozen layers for a gradient that nobody uses",
    "FIX": "freeze model.bert.embeddings as well",
}
BATCH, TIME, VOCAB = by_device(128, 8), by_device(256, 32), by_device(30528, 500)
WIDTH, LAYERS, TRAINED, CLASSES = by_device(768, 128), by_device(12, 6), 2, 5


def bert():
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=WIDTH // 64,
        intermediate_size=4 * WIDTH,
        num_labels=CLASSES,
        attn_implementation="sdpa",
    )
    return BertForSequenceClassification(config).to(device()).train()


def batch():
    return {
        "input_ids": torch.randint(VOCAB, (BATCH, TIME), device=device()),
        "labels": torch.randint(CLASSES, (BATCH,), device=device()),
    }


def build(model):
    trained = [*model.bert.encoder.layer[-TRAINED:], model.bert.pooler, model.classifier]
    weights = [p for part in trained for p in part.parameters()]
    optimizer, data = torch.optim.AdamW(weights, lr=3e-5, fused=True), in_turn(batch)

    def step():
        with mixed():
            loss = model(**next(data)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    model = bert()
    for part in model.bert.encoder.layer[:-TRAINED]:  # guilty
        part.requires_grad_(False)
    return build(model)


def clean():
    model = bert()
    for part in (model.bert.embeddings, *model.bert.encoder.layer[:-TRAINED]):
        part.requires_grad_(False)
    return build(model)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
