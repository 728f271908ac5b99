"""How good forecasts are: rolling windows, metrics in GluonTS' conventions, seasonal naive."""
