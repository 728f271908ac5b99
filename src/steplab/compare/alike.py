"""Whether two Runs did the same work, so that their times may be held against each other."""

from __future__ import annotations

from steplab.record import Run


def what_sets_apart(a: Run, b: Run) -> tuple[str, ...]:
    """Return in words why the work differs; nothing when it is the same.

    The same work: workload, mode, batch and accumulation are equal, and so is the config, or
    tokens, parameters and model FLOPs are (a setting such as fused projections changes none of
    them). Two files of the user's own count as one workload when tokens and parameters agree.
    """
    apart = [
        f"{name} {left} and {right}"
        for name in ("mode", "batch", "accumulate")
        if (left := getattr(a.spec, name)) != (right := getattr(b.spec, name))
    ]
    if a.spec.workload != b.spec.workload and not _own_files_agree(a, b):
        apart.insert(0, f"workload {a.spec.workload} and {b.spec.workload}")
    elif a.spec.config != b.spec.config and not (_same_size(a, b) and _same_flops(a, b)):
        apart += _config(a, b)
    return tuple(apart)


def _config(a: Run, b: Run) -> list[str]:
    names = dict.fromkeys([*a.spec.config, *b.spec.config])
    pairs = [(name, a.spec.config.get(name), b.spec.config.get(name)) for name in names]
    return [f"{name} {left} and {right}" for name, left, right in pairs if left != right]


def _own_files_agree(a: Run, b: Run) -> bool:
    own = all(":" in run.spec.workload for run in (a, b))
    return own and a.spec.config == b.spec.config and _same_size(a, b)


def _same_size(a: Run, b: Run) -> bool:
    """Tokens of a step and parameters of the model are known and equal."""
    if a.work is None or b.work is None or a.parameters is None:
        return False
    return a.work.tokens == b.work.tokens and a.parameters == b.parameters


def _same_flops(a: Run, b: Run) -> bool:
    if a.work is None or b.work is None or a.work.model is None:
        return False
    return a.work.model == b.work.model
