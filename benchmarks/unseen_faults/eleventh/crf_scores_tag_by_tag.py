"""A named-entity tagger: word vectors, a bidirectional LSTM and a conditional random field. In the
forward algorithm of the field, the score of each next tag is computed on its own in an inner
Python loop over the tags, as in a well-known tutorial.
A good finding names the inner loop over the tags in the forward algorithm.
"""

import torch
from torch import nn

from common import adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the forward algorithm of the CRF takes a logsumexp per next tag in a Python loop",
    "FIX": "broadcast over all pairs of tags and take one logsumexp per word",
}
BATCH, TIME, TAGS, VOCAB = by_device(256, 48), by_device(64, 20), 9, by_device(20000, 2000)
WIDTH = by_device(256, 144)


def normalizer_by_tag(emissions, transitions):
    alpha = emissions[:, 0]
    for word in emissions.unbind(1)[1:]:
        scores = []
        for tag in range(TAGS):
            scores.append(torch.logsumexp(alpha + transitions[:, tag], 1) + word[:, tag])  # guilty
        alpha = torch.stack(scores, 1)
    return alpha.logsumexp(1)


def normalizer(emissions, transitions):
    alpha = emissions[:, 0]
    for word in emissions.unbind(1)[1:]:
        alpha = torch.logsumexp(alpha.unsqueeze(2) + transitions, 1) + word
    return alpha.logsumexp(1)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, TAGS)
        self.transitions = nn.Parameter(0.1 * torch.randn(TAGS, TAGS))

    def forward(self, words):
        return self.head(self.lstm(self.words(words))[0])


def build(log_z):
    model = Tagger().to(device())
    optimizer = adamw(model)
    shape = (BATCH, TIME)
    data = in_turn(
        lambda: (
            torch.randint(VOCAB, shape, device=device()),
            torch.randint(TAGS, shape, device=device()),
        )
    )

    def step():
        words, tags = next(data)
        with mixed():
            emissions = model(words)
        emissions = emissions.float()
        gold = emissions.gather(2, tags.unsqueeze(2)).sum((1, 2))
        gold = gold + model.transitions[tags[:, :-1], tags[:, 1:]].sum(1)
        loss = (log_z(emissions, model.transitions) - gold).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(normalizer_by_tag)


def clean():
    return build(normalizer)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
