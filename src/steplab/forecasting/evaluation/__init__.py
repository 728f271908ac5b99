"""How good forecasts are: rolling windows, metrics as GluonTS defines them, seasonal naive."""
