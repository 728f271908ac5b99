"""Makes steps and runs them."""
