"""Compares results with fp64 in such a way that a failure says where it is.

Attention by batch, head and tile; sequences by batch, step and channel.
"""

import torch

NAMES = ("out", "dq", "dk", "dv")


def tile_norms(x_BHTD: torch.Tensor, tile: int) -> torch.Tensor:
    """Return (B, H, tiles): the norm of each tile of rows."""
    squares_BHT = x_BHTD.double().nan_to_num(nan=torch.inf).square().sum(-1)
    parts = squares_BHT.split(tile, dim=-1)
    return torch.stack([part.sum(-1) for part in parts], -1).sqrt()


def worst_tiles(actual, peer, truth, tile=16, shown=5):
    """Return a line for each of the tiles with the largest error, beside the peer's own error."""
    ours, theirs = (tile_norms(x.double() - truth, tile) for x in (actual, peer))
    ratio = ours / theirs.clamp_min(float(theirs.mean()) + 1e-300)
    order = ratio.flatten().argsort(descending=True)[:shown]
    lines = []
    for index in order.tolist():
        b, h, t = (int(i) for i in torch.unravel_index(torch.tensor(index), ratio.shape))
        rows = f"rows {t * tile}-{min((t + 1) * tile, truth.shape[2]) - 1}"
        lines.append(
            f"batch {b}, head {h}, {rows}: error {float(ours[b, h, t]):.2e}, "
            f"the reference's own {float(theirs[b, h, t]):.2e}"
        )
    return "\n".join(lines)


def assert_results(actual, peer, truth, label, floors=(0.0, 0.0, 0.0, 0.0), tile=16):
    """Assert that out, dq, dk and dv are as good as a reference of equal precision.

    As a whole: twice the reference's own error and one rounding. In each tile: four times the
    larger of the reference's error there and on average, and one rounding. `floors` are added:
    what rounding may leave of values that cancel.
    """
    for name, a, p, t, floor in zip(NAMES, actual, peer, truth, floors, strict=True):
        assert a.shape == t.shape and a.dtype == p.dtype, f"{label} {name}"
        ours, theirs = (tile_norms(x.double() - t, tile) for x in (a, p))
        rounding = tile_norms(t.to(a.dtype).double() - t, tile)
        allowed = 4 * torch.maximum(theirs, theirs.mean()) + rounding + floor
        error, budget = float(ours.norm()), float(2 * theirs.norm() + rounding.norm()) + floor
        good = error <= budget and bool((ours <= allowed).all())
        where = worst_tiles(a, p, t, tile)
        assert good, f"{label} {name}: error {error:.2e}, budget {budget:.2e}\n{where}"


def assert_sequences(actual, peer, truth, label, floor):
    """Assert that named results are about as near to fp64 as a reference of equal precision.

    As near is twice the reference's own error, one rounding of the result, and `floor`, all
    relative to the norm of the result.
    """
    for name, expected in truth.items():
        found, other = actual[name], peer[name]
        assert found.shape == expected.shape and found.dtype == other.dtype, f"{label} {name}"
        size = expected.norm().clamp_min(1e-300)
        rounding = float((expected.to(found.dtype).double() - expected).norm() / size)
        theirs = float((other.double() - expected).norm() / size)
        error = float((found.double() - expected).norm() / size)
        budget = 2 * theirs + rounding + floor
        place = worst_step(found, expected)
        assert error <= budget, f"{label} {name}: error {error:.1e}, budget {budget:.1e}{place}"


def worst_step(actual, truth):
    """Return the batch, step and channel of the worst error of a (B, L, D) result."""
    if actual.ndim != 3:
        return ""
    error = (actual.double() - truth).abs().nan_to_num(nan=torch.inf)
    b, t, d = (int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    return f"; worst at batch {b}, step {t}, channel {d}"
