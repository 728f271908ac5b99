"""Mathematics with more than one implementation. A folder is an op, a file an implementation."""
