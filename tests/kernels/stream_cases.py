"""Inputs, results and comparisons for tests of the norm that adds, shifts, scores and takes."""

from dataclasses import dataclass

import torch

from steplab.kernels import stream_norm as op
from steplab.kernels.stream_norm import Norm, Update
from steplab.workloads.hydra.routing import choose_rows
from tests.kernels.case import Named
from tests.kernels.norm_cases import BF16, EPS, FP32, compare


@dataclass(frozen=True)
class StreamCase(Named):
    """`added`: dtype of the update, None for none; `placed`: of how many rows, None for all.

    `taken`: rows to take by their scores, None for the norm of all rows.
    """

    shape: tuple[int, int, int] = (2, 7, 24)
    stream: torch.dtype = FP32
    weight: torch.dtype = FP32
    added: torch.dtype | None = FP32
    placed: int | None = None
    taken: int | None = None
    offset: bool = True
    out: torch.dtype | None = None
    passed: bool = True  # whether the stream is used after the norm, and so has a gradient
    scored: bool = True  # whether the scores have a gradient


CASES = [
    StreamCase(),
    StreamCase(added=None, offset=False),
    StreamCase(placed=3, passed=False),
    StreamCase(placed=3, taken=4),
    StreamCase(taken=1),
    StreamCase(added=None, taken=7),
    StreamCase(placed=1, taken=4, offset=False),
    StreamCase(placed=3, taken=4, passed=False),
    StreamCase(placed=3, taken=4, scored=False),
    StreamCase(placed=2, taken=3, added=BF16, out=BF16),
    StreamCase(stream=BF16, weight=BF16, added=BF16),
    StreamCase(stream=BF16, weight=BF16, added=BF16, placed=3, taken=4),
]


def choice_of(batch, length, taken, generator, device):
    """Return some rows of every sequence, in any order."""
    rows = [torch.randperm(length, generator=generator)[:taken] for _ in range(batch)]
    return choose_rows(torch.stack(rows).to(device), length)


def stream_inputs(case, device="cpu"):
    """Return the leaves by name, the choices (placed and taken), and the outputs' gradients."""
    generator = torch.Generator().manual_seed(0)

    def normal(dtype, *shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    batch, length, width = case.shape
    leaves = {"x": 3 * normal(case.stream, *case.shape)}
    leaves["weight"] = 1 + 0.5 * normal(case.weight, width)
    if case.offset:
        leaves["offset"] = normal(case.weight, width)
    if case.added is not None:
        leaves["added"] = normal(case.added, batch, case.placed or length, width)
    if case.taken:
        leaves["router"] = normal(case.weight, width)
    choices = [
        None if count is None else choice_of(batch, length, count, generator, device)
        for count in (case.placed, case.taken)
    ]
    stream = torch.promote_types(case.stream, case.added or case.stream)
    normed = normal(case.out or stream, batch, case.taken or length, width)
    return leaves, choices, [normed, normal(stream, *case.shape), normal(FP32, batch, length)]


def run_stream(impl, case, leaves, choices):
    """Return norm, stream and, where there is a router, scores."""
    norm = Norm(leaves["weight"], EPS, leaves.get("offset"))
    update = Update(leaves["added"], choices[0]) if "added" in leaves else None
    impl = op.choose(impl, leaves["x"], update, norm)
    if choices[1] is None:
        ends = not case.passed
        return op.add_and_norm(impl, leaves["x"], update, norm, case.out, ends)
    scored = op.add_and_score(impl, leaves["x"], update, norm, leaves["router"])
    assert not scored.score_BS.requires_grad
    return op.take_normed(impl, scored, choices[1], norm, leaves["router"], case.out)


def stream_results(impl, case, leaves, choices, gradients, through=run_stream):
    """Return the outputs and all gradients by name."""
    leaves = {name: t.detach().requires_grad_() for name, t in leaves.items()}
    out = through(impl, case, leaves, choices)
    used = [True, case.passed, case.scored]
    pairs = [(o, g) for o, g, use in zip(out, gradients, used, strict=False) if use]
    found = torch.autograd.grad(
        [o for o, _ in pairs], [*leaves.values()], [g.to(o.dtype) for o, g in pairs],
        allow_unused=True,
    )  # fmt: skip
    results = dict(zip(("normed", "stream", "score"), (o.detach() for o in out), strict=False))
    found = zip(leaves, found, strict=True)
    return results | {f"d{name}": gradient for name, gradient in found if gradient is not None}


def check_stream(impl, case, device="cpu", through=run_stream):
    """Compare an implementation with the definition in fp64."""
    leaves, choices, gradients = stream_inputs(case, device)
    actual = stream_results(impl, case, leaves, choices, gradients, through)
    peer = stream_results("reference", case, leaves, choices, gradients)
    wide = {name: t.double() for name, t in leaves.items()}
    exact = StreamCase(case.shape, taken=case.taken, passed=case.passed, scored=case.scored)
    doubles = [g.double() for g in gradients]
    truth = stream_results("reference", exact, wide, choices, doubles)
    compare(actual, peer, truth, f"{impl} {case}")
