"""Forecasts of any length from a trained model. Importing this package imports torch."""

from steplab.forecasting.forecaster import Forecaster
from steplab.forecasting.prediction import Prediction

__all__ = ["Forecaster", "Prediction"]
