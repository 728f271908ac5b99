"""Forecasts of any length from a trained model, and how good they are."""
