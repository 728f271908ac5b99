"""A training script, unedited, as a model of one's own."""
