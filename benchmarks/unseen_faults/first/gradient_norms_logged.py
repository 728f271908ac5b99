"""A loop that logs the norm of every gradient. Own loop."""

import torch

from common import Decoder, adamw, device, main, next_token_loss, pick

FAULT = {
    "NAME": "gradient_norms_logged",
    "CAUSE": "The gradient norm of every parameter is read with .item() in every step for the log, so the host waits for the GPU hundreds of times per step.",
    "LINE": "# FAULT",
    "KIND": "time",
    "FIX": "Compute all norms with one torch._foreach_norm, keep them on the device, and read them every 100 steps.",
    "STYLE": "loop",
}
BATCH, CONTEXT, VOCAB = pick(4, 2), pick(1024, 16), pick(8192, 64)


def make(reads):
    dev = device()
    model = Decoder(pick(768, 32), pick(24, 1), VOCAB, CONTEXT).to(dev)
    optimizer = adamw(model)
    data = torch.randint(VOCAB, (8, BATCH, CONTEXT + 1), device=dev)
    names = [name for name, _ in model.named_parameters()]
    history, count = [], 0

    def step():
        nonlocal count
        loss = next_token_loss(model, data[count % 8])
        loss.backward()
        if reads:
            norms = {}
            for name, parameter in model.named_parameters():
                norms[name] = parameter.grad.norm().item()  # FAULT
            history.append(norms)
        else:
            norms = torch.stack(torch._foreach_norm([p.grad for p in model.parameters()]))
            if count % 100 == 99:
                history.append(dict(zip(names, norms.tolist(), strict=True)))
        count += 1
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main(faulty=lambda: make(True), clean=lambda: make(False))
