"""nn.Modules that two workloads share, or that techniques look for.

A module whose mathematics has several implementations declares three attributes: `op` (the folder
in `kernels/`), `impl` (what was asked for, "auto" at first) and `ran` (what executed last).
"""
