"""A recipe and the Meter inside other people's training loops: one file per library."""
