"""What is trained: built-in workloads, a folder each, and models of the user's own."""
