"""One kind of measurement each. A probe fills the field of Run that bears its file's name."""
