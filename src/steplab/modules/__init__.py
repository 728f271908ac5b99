"""nn.Modules that several workloads share or that techniques look for, and the optimizer.

A module whose math has several implementations declares three attributes: `op` (the folder in
`kernels/`), `impl` (what was asked for, at first "auto") and `ran` (what executed last).
"""
