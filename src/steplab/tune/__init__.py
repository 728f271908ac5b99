"""The search: one technique at a time on top of the best recipe so far, each through the gate."""
