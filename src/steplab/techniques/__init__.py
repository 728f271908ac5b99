"""One change to how a step executes, per file.

Torch is imported inside `apply` only, so that recipes can be read and checked without it.
"""
