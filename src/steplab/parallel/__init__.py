"""Several ranks that compute one step: their group, and the schemes by which gradients meet.

N ranks with A micro-batches each are one rank with N * A micro-batches: the same loss, the same
gradients, the same data in the same order. Everything here follows from that rule.
"""
