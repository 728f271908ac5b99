"""How fast a model forecasts: latency per call and series per second, cached and uncached."""
