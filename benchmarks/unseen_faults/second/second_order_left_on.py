"""A loop that takes gradients by torch.autograd.grad, since it once had a penalty on them. Own loop."""

import torch

from common import Decoder, adamw, device, main, next_token_loss, pick

FAULT = {
    "NAME": "second_order_left_on",
    "CAUSE": "create_graph=True is left over from a gradient penalty that is gone: the backward keeps all activations and saves what its own backward would need.",
    "LINE": "# FAULT",
    "KIND": "memory",
    "FIX": "torch.autograd.grad(loss, parameters) without create_graph.",
    "STYLE": "loop",
    "WHY": "Nothing is ever differentiated twice, yet the backward builds a graph: no activation is freed while it runs, and its intermediate gradients are kept too.",
    "GAIN_MS": None,
}
BATCH, CONTEXT, VOCAB = pick(8, 2), pick(1024, 16), pick(16384, 64)


def make(second_order):
    dev = device()
    torch.manual_seed(0)
    model = Decoder(pick(1024, 32), pick(8, 1), VOCAB, CONTEXT).to(dev)
    optimizer = adamw(model)
    parameters = list(model.parameters())
    data = torch.randint(VOCAB, (8, BATCH, CONTEXT + 1), device=dev)
    count = 0

    def step():
        nonlocal count
        loss = next_token_loss(model, data[count % 8])
        count += 1
        if second_order:
            gradients = torch.autograd.grad(loss, parameters, create_graph=True)  # FAULT
        else:
            gradients = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.detach()
        del gradients
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def faulty():
    return make(second_order=True)


def clean():
    return make(second_order=False)


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
