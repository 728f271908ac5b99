"""A language model is tuned on preferences without a reference model (SimPO): the mean log-probability of
the chosen answer against that of the rejected one. The log-probability of each token is picked by a
product with a one-hot tensor as large as the logits, because that reads like the formula.
A good finding names the one-hot product over the vocabulary that picks one value each, and the line.
"""

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "log-probabilities of the tokens are picked by a product with a one-hot tensor",
    "FIX": "pick them by gather",
}
VOCAB, WIDTH, LAYERS = by_device(50_304, 4000), by_device(768, 96), by_device(6, 2)
PAIRS, CONTEXT, BETA, MARGIN = by_device(8, 3), by_device(512, 64), 2.0, 0.5


def by_product(log_probs, ids):
    return (log_probs * F.one_hot(ids, VOCAB)).sum(-1)  # guilty


def by_index(log_probs, ids):
    return log_probs.gather(-1, ids[..., None]).squeeze(-1)


def build(pick):
    model = Decoder(WIDTH, LAYERS, VOCAB, CONTEXT).to(device())
    optimizer = adamw(model)
    data = in_turn(lambda: torch.randint(VOCAB, (2 * PAIRS, CONTEXT + 1), device=device()))

    def step():
        ids = next(data)  # the chosen answers, then the rejected
        with mixed():
            logits = model(ids[:, :-1])
        log_probs = F.log_softmax(logits.float(), -1)
        chosen, rejected = pick(log_probs, ids[:, 1:]).mean(-1).chunk(2)
        loss = -F.logsigmoid(BETA * (chosen - rejected) - MARGIN).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return build(by_product)


def clean():
    return build(by_index)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
