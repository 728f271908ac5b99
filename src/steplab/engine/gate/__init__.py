"""The gate: numerics before speed. What cannot be verified has not passed."""
