"""An encoder-decoder in the manner of Hugging Face takes encoder_outputs as an option. The script
runs the encoder for a classification loss and then calls the model with the tokens alone, so that
it encodes the same source again for the decoder.
A good finding names the encoder that runs twice on the same tokens, and the line.
"""

import torch
import torch.nn.functional as F
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the encoder runs once for its own loss and again in the model for the decoder",
    "FIX": "pass encoder_outputs to the model",
}
BATCH, SOURCE, TARGET = by_device(32, 4), by_device(512, 64), by_device(64, 8)
VOCAB, LABELS, WIDTH, LAYERS = by_device(8192, 512), 12, by_device(768, 128), by_device(6, 3)


def stack(kind, layers):
    how = {"dropout": 0.0, "batch_first": True, "norm_first": True}
    return nn.ModuleList(kind(WIDTH, WIDTH // 64, 4 * WIDTH, **how) for _ in range(layers))


class Encoder(nn.Module):
    def __init__(self, tokens):
        super().__init__()
        self.tokens, self.places = tokens, nn.Embedding(SOURCE, WIDTH)
        self.layers = stack(nn.TransformerEncoderLayer, LAYERS)

    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return x


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.encoder = Encoder(self.tokens)
        self.layers = stack(nn.TransformerDecoderLayer, LAYERS // 2)
        self.head, self.classify = nn.Linear(WIDTH, VOCAB), nn.Linear(WIDTH, LABELS)
        mask = nn.Transformer.generate_square_subsequent_mask(TARGET)
        self.register_buffer("mask", mask)

    def forward(self, input_ids, decoder_input_ids, encoder_outputs=None):
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids)
        x = self.tokens(decoder_input_ids)
        for layer in self.layers:
            x = layer(x, encoder_outputs, tgt_mask=self.mask, tgt_is_causal=True)
        return self.head(x)


def prepare():
    model = Seq2Seq().to(device())
    data = in_turn(
        lambda: (
            torch.randint(VOCAB, (BATCH, SOURCE), device=device()),
            torch.randint(VOCAB, (BATCH, TARGET + 1), device=device()),
            torch.randint(LABELS, (BATCH,), device=device()),
        )
    )
    return model, adamw(model), data


def update(optimizer, logits, text, guess, topic):
    loss = F.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
    loss = loss + 0.1 * F.cross_entropy(guess.float(), topic)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def faulty():
    model, optimizer, data = prepare()

    def step():
        source, text, topic = next(data)
        with mixed():
            guess = model.classify(model.encoder(source).mean(1))
            logits = model(source, text[:, :-1])  # guilty
        return update(optimizer, logits, text, guess, topic)

    return step


def clean():
    model, optimizer, data = prepare()

    def step():
        source, text, topic = next(data)
        with mixed():
            states = model.encoder(source)
            guess = model.classify(states.mean(1))
            logits = model(source, text[:, :-1], encoder_outputs=states)
        return update(optimizer, logits, text, guess, topic)

    return step


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
