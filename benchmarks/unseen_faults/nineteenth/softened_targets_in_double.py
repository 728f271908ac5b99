"""A small language model learns from a larger one: at each position it is to match the teacher's softened
distribution over the vocabulary. To be safe with small probabilities, both sides' logits are taken to
float64 before the softmax and the divergence, so the largest tensors of the step are twice as large
and several times as slow, forward and backward. In float32, log-softmax is stable as it is.
A good finding names the float64 work on the logits (softmax, divergence), and the line of the cast.
"""

import torch
import torch.nn.functional as F

from common import Decoder, adamw, by_device, device, in_turn, main, mixed

FAULT = {
    "KIND": "time",
    "STYLE": "loop",
    "CAUSE": "the divergence over the vocabulary is computed in float64",
    "FIX": "compute log-softmax and divergence in float32",
}
BATCH, CONTEXT, VOCAB = by_device(16, 2), by_device(512, 48), by_device(32_768, 7000)
STUDENT, TEACHER, LAYERS = by_device(384, 64), by_device(512, 64), by_device(4, 2)
HEAT = 2.0


def divergence_in(dtype):
    def divergence(student, teacher):
        student, teacher = student.to(dtype), teacher.to(dtype)  # guilty
        told = F.log_softmax(student / HEAT, dim=-1)
        wanted = F.log_softmax(teacher / HEAT, dim=-1)
        return F.kl_div(told, wanted, reduction="batchmean", log_target=True) * HEAT**2

    return divergence


def train(divergence):
    torch.manual_seed(0)
    student = Decoder(STUDENT, LAYERS, VOCAB, CONTEXT).to(device())
    teacher = Decoder(TEACHER, LAYERS, VOCAB, CONTEXT).to(device()).requires_grad_(False)
    updates = adamw(student)
    stream = in_turn(lambda: torch.randint(VOCAB, (BATCH, CONTEXT), device=device()))

    def step():
        ids = next(stream)
        with mixed():
            told = student(ids).flatten(0, 1)
            with torch.no_grad():
                wanted = teacher(ids).flatten(0, 1)
        loss = divergence(told, wanted)
        loss.backward()
        updates.step()
        updates.zero_grad()
        return loss.detach()

    return step


def faulty():
    return train(divergence_in(torch.float64))


def clean():
    return train(divergence_in(torch.float32))


if __name__ == "__main__":
    main(faulty=faulty, clean=clean)
