"""Kineto traces of any origin, on a machine that needs neither torch nor a GPU."""
