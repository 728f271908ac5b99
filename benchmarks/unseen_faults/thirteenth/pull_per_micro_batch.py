"""A language model is fine-tuned on five tasks, whose texts have different lengths, with one micro-batch
of each per update, and with a pull toward its pretrained weights: the distance of every weight from
where it began is added to the gradients. The loop does so after each micro-batch, a fifth each time,
though the weights do not move in between: five times over all weights where once would do.
A good finding names the pull toward the old weights that is repeated per micro-batch and the line.
"""

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the pull toward the pretrained weights is added to all gradients after every micro-batch although it is the same for all of them",
    "FIX": "add it once, with its full strength, after the last micro-batch",
}
WIDTH, LAYERS, VOCAB = by_device(2048, 320), by_device(4, 2), by_device(8192, 256)
TIME, TASKS, PULL = by_device(512, 16), 5, 0.01


def build(each):
    with torch.device(device()):
        model = Decoder(WIDTH, LAYERS, VOCAB, TIME)
    optimizer = adamw(model)
    weights = list(model.parameters())
    pretrained = [w.detach().clone() for w in weights]

    def batches():
        shapes = [(2**i, TIME // 2**i + 1) for i in range(TASKS)]
        return [torch.randint(VOCAB, shape, device=device()) for shape in shapes]

    data = in_turn(batches)

    @torch.no_grad()
    def pull(strength):
        gradients = [w.grad for w in weights]
        torch._foreach_add_(gradients, torch._foreach_sub(weights, pretrained), alpha=strength)

    def step():
        total = 0
        for ids in next(data):
            with mixed():
                logits = model(ids[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) / TASKS
            loss.backward()
            if each:
                pull(PULL / TASKS)  # guilty
            total = total + loss.detach()
        if not each:
            pull(PULL)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def faulty():
    return build(True)


def clean():
    return build(False)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
