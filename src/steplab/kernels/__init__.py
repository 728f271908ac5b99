"""Ops with several implementations. A folder is an op, a file in it an implementation."""
