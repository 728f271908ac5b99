"""Two sets of measurements: faster, slower, or cannot tell. No torch."""
