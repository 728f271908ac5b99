"""Facts about devices and the cost of operations: pure data, no torch."""
