"""One change to how a step executes, per file. Torch is imported inside `apply` only, so that a
recipe can be read and checked where there is no torch."""
