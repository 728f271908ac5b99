"""How fast, how large and how exact the routed experts are, by implementation and routing."""
