"""What a stored Run says about itself. No torch."""
