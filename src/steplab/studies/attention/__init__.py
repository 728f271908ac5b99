"""How fast, how large and how exact attention is, by implementation and by tile."""
