"""One fault per file, named for the fault and never for its cure."""
