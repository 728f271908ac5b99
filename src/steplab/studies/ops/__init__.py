"""How fast, how large and how exact one op is: what the studies of single ops share."""
