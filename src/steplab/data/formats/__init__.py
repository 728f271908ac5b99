"""File formats of series, one file each."""
