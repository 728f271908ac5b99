"""Forecasts of any length from a trained model. Importing this package imports torch."""

from steplab.engine.forecasting.forecaster import Forecaster
from steplab.engine.forecasting.prediction import Prediction

__all__ = ["Forecaster", "Prediction"]
