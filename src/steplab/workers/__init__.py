"""Worker processes: client, program, pool, and the alternation of two live steps."""
