"""What an op has to do at least, by its arguments alone: FLOPs and bytes. No torch."""
