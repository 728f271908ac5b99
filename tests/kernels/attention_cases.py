"""Inputs for tests of attention, and the gradients of any implementation."""

from dataclasses import dataclass

import torch

from steplab.kernels import attention as op
from tests.kernels.case import Named
from tests.kernels.mismatch import assert_results


@dataclass(frozen=True)
class Case(Named):
    """One shape: `key_heads` and `keys` are those of the queries unless given."""

    batch: int = 1
    heads: int = 2
    key_heads: int = 0
    queries: int = 40
    keys: int = 0
    width: int = 16
    causal: bool = True
    documents: bool = False
    dtype: torch.dtype = torch.float32
    seed: int = 0


def make(case: Case, device="cpu"):
    """Return q, k, v and d_out, the first three as views of (B, T, H, D), and documents or None."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(heads, length):
        shape = (case.batch, length, heads, case.width)
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return x.to(device, case.dtype).transpose(1, 2)

    S, G = case.keys or case.queries, case.key_heads or case.heads
    tensors = normal(case.heads, case.queries), normal(G, S), normal(G, S)
    documents = None
    if case.documents:
        # A new document at one position in nine; ids come back, and are then another document.
        is_new = torch.rand(case.batch, S, generator=generator) < 1 / 9
        documents = (is_new.cumsum(1) % 3).to(device, torch.int32)
    return *tensors, normal(case.heads, case.queries), documents


def results(impl, q, k, v, d_out, documents, causal):
    """Return out, dq, dk and dv."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = op.attention(impl, *leaves, causal, documents)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def cancellation(q, k, v, d_out):
    """Return what rounding may cost in out, dq, dk and dv, even where the exact value cancels to 0.

    A weight meets a row of v or of d_out. A score's gradient is a difference of two products of a
    row of d_out and a row of v; it then meets a row of k or of q.
    """
    longest_q, longest_k, longest_v = (float(x.double().norm(dim=-1).max()) for x in (q, k, v))
    unit, rows = torch.finfo(q.dtype).eps, q[..., 0].numel()
    weight = unit * float(d_out.double().norm())
    score = weight * longest_v / q.shape[-1] ** 0.5
    return unit * longest_v * rows**0.5, score * longest_k, score * longest_q, weight


def check(impl, case: Case, device="cpu", tiny=False):
    """Compare an implementation with the definition in fp64.

    In a `tiny` case the reference may be exact by chance, so cancellation is allowed for.
    """
    q, k, v, d_out, documents = make(case, device)
    assert op.choose(impl, q, k, v, case.causal, documents) == impl
    actual = results(impl, q, k, v, d_out, documents, case.causal)
    peer = results("reference", q, k, v, d_out, documents, case.causal)
    exact = [x.double() for x in (q, k, v, d_out)]
    truth = results("reference", *exact, documents, case.causal)
    floors = cancellation(q, k, v, d_out) if tiny else (0.0,) * 4
    assert_results(actual, peer, truth, f"{impl} {case}", floors)


def alone(case: Case, row: int):
    """Return the results' inputs of one row of the batch, as a batch of one."""
    *tensors, documents = make(case)
    one = [x[row : row + 1] for x in tensors]
    return *one, None if documents is None else documents[row : row + 1]
