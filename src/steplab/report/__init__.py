"""Records on a terminal, as HTML pages, as charts and as files. Computes nothing; no torch."""
