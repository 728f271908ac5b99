"""Updates of AdamW by any implementation, beside an fp64 one."""

import torch

from steplab.kernels.adamw import Hyperparameters, ParameterState, update, update_all
from steplab.testing.tolerance import assert_as_good_as

RULE = Hyperparameters(0.9, 0.999, 1e-8, 0.1)
STEPS = 3


def update_among_others(impl, weight, *rule):
    """Update a parameter between two others, in the launch of all three where it is small."""
    others = [ParameterState(*(None if t is None else t.clone() for t in weight)) for _ in range(2)]
    update_all(impl, [others[0], weight, others[1]], *rule)


def updated(impl, start, grads, param_dtype, coefficient, update=update):
    """Return the weights after some steps, and the moments; by a master where 16-bit."""
    wide = torch.promote_types(param_dtype, torch.float32)
    exact = start.to(wide, copy=True)
    param = exact if param_dtype == wide else exact.to(param_dtype)
    moments = torch.zeros_like(exact), torch.zeros_like(exact)
    step = torch.zeros((), device=start.device)
    lr = torch.tensor(1e-2, dtype=torch.float64, device=start.device)
    for number, grad in enumerate(grads):
        step += 1
        lr.fill_(1e-2 / (number + 1))
        master = None if param is exact else exact
        update(impl, ParameterState(param, master, grad, *moments, step), RULE, lr, coefficient)
    return {"param": param, "weight": exact, "exp_avg": moments[0], "exp_avg_sq": moments[1]}


def check_update(impl, param_dtype, grad_dtype, size, clipped, device="cpu", update=update):
    """Compare an implementation with the definition in fp64, after steps of a falling rate."""
    generator = torch.Generator().manual_seed(0)
    start, *grads = (torch.randn(size, generator=generator) for _ in range(STEPS + 1))
    start, grads = start.to(device), [(1e-2 * g).to(device, grad_dtype) for g in grads]
    coefficient = torch.tensor(0.37, device=device) if clipped else None
    actual = updated(impl, start, grads, param_dtype, coefficient, update)
    peer = updated("reference", start, grads, param_dtype, coefficient)
    wide = None if coefficient is None else coefficient.double()
    truth = updated("reference", start.double(), [g.double() for g in grads], torch.float64, wide)
    assert torch.equal(actual["param"], actual["weight"].to(param_dtype))
    for name, value in actual.items():
        assert value.dtype == peer[name].dtype
        # One weight's error may be 0 by chance: two roundings of its dtype are always allowed.
        floor = 2 * torch.finfo(value.dtype).eps * truth[name].norm()
        error = (value.double() - truth[name]).norm()
        if error > floor:
            assert_as_good_as(value, peer[name], truth[name], f"{impl} {name} of {size}")


def check_changes_are_kept(impl, size, device="cpu"):
    """Elements of a 16-bit parameter that somebody has changed start from there, others do not."""
    generator = torch.Generator().manual_seed(1)
    exact, grad = (torch.randn(size, generator=generator).to(device) for _ in range(2))
    changed = torch.arange(size, device=device) % 3 == 1
    new = torch.where(changed, 0.5 * exact.bfloat16(), exact.bfloat16())
    wanted = torch.where(changed, new.float(), exact)  # what is trained on
    lr = torch.tensor(1e-2, dtype=torch.float64, device=device)

    def after(name, param, master):
        moments = torch.zeros_like(exact), torch.zeros_like(exact)
        weight = ParameterState(param, master, grad, *moments, torch.ones((), device=device))
        update_among_others(name, weight, RULE, lr, None)
        return weight

    found = after(impl, new.clone(), exact.clone())
    expected = after(impl, wanted.bfloat16(), wanted.clone())
    assert torch.equal(found.master, expected.master)
    assert torch.equal(found.param, expected.master.bfloat16())
