"""Forecaster: a trained model that forecasts arrays, frames and GluonTS datasets."""

# B series, T points, H points of the horizon, Q quantiles
from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from steplab.core import PLAIN, Recipe
from steplab.core.errors import UserError
from steplab.forecasting.contexts import Series, read_contexts
from steplab.forecasting.decode import DecodePass, HeadRule, choose_heads, plan_passes
from steplab.forecasting.inference import Progress, forecast_batches
from steplab.forecasting.prediction import Prediction, choose_levels
from steplab.techniques.recipes import parse_recipe
from steplab.train.pretrained import ForwardContext, find_pretrained, load_for_inference
from steplab.workloads.tsmoe.model import Tsmoe
from steplab.workloads.user_model import load_user_model

if TYPE_CHECKING:
    import pandas as pd

    from steplab.forecasting.gluonts_predictor import GluonTSPredictor

BATCH = 256


class Forecaster:
    """Forecasts series of any length over any horizon; see docs/forecasting.md.

    `warn` is called with what a user should know about the inputs, each kind of message once.
    """

    def __init__(
        self,
        model: Tsmoe,
        name: str = "model",
        forward_context: ForwardContext = contextlib.nullcontext,
        warn: Callable[[str], None] = lambda text: warnings.warn(text, stacklevel=2),
    ) -> None:
        self.model = model.eval()
        self.name = name
        self.forward_context = forward_context
        self._warn = warn
        self._warned: set[str] = set()

    @classmethod
    def load(
        cls,
        path: str | Path | None = None,
        device: str = "auto",
        recipe: str | Recipe = PLAIN,
        model: str = "",
        **options: Any,
    ) -> Forecaster:
        """Load a steplab checkpoint, the newest in a folder of them, or a Time-MoE folder.

        Without a path: the newest in the default folder of `steplab train`. `device` is cpu,
        cuda or auto; `recipe` may have precision and impl, as in "precision=bf16". `model` names
        the file of your own model, "my_model.py:make", for a checkpoint of one.
        """
        wanted = parse_recipe(recipe) if isinstance(recipe, str) else recipe
        own = load_user_model(model) if model else None
        found = find_pretrained(None if path is None else Path(path), own)
        built = found.workload.open(found.config).model()
        if not isinstance(built, Tsmoe):
            raise UserError(
                f"{found.path} is a model of {found.workload.name}, which forecasts no series."
            )
        context = load_for_inference(found, built, device, wanted, "forecasts")
        forecaster = cls(built, str(found.path), context, **options)
        if found.note:
            forecaster.warn_once(found.note)
        return forecaster

    @property
    def is_point_model(self) -> bool:
        """Whether the model predicts one value per point and no quantiles."""
        return not self.levels

    @property
    def levels(self) -> tuple[float, ...]:
        """The quantiles that the model was trained to predict."""
        return self.model.config.quantile_levels

    def passes(self, horizon: int, head: HeadRule = "largest") -> tuple[DecodePass, ...]:
        """Return how the horizon is decoded; `passes[0].context` points of the past are used."""
        config = self.model.config
        heads = choose_heads(horizon, config.horizon_lengths, config.patch_length, head)
        return plan_passes(heads, config.seq_max_len)

    def predict(
        self,
        context: Any,
        horizon: int,
        *,
        quantiles: Sequence[float] | None = None,
        batch: int = BATCH,
        head: HeadRule = "largest",
        cached: bool = True,
        names: Sequence[Any] | None = None,
        progress: Progress | None = None,
    ) -> Prediction:
        """Forecast `horizon` points after each context, in their own units and order.

        `context` is a 1-D array (one series), a list of 1-D arrays, or a 2-D array padded with
        NaN on the left; numpy or torch. NaN and Inf are missing points. `quantiles` picks levels
        among the trained ones; None means all. `names` are used in messages; `progress` is called
        with the number of series done. `cached=False` computes everything again for every head,
        with the same result.
        """
        series = read_contexts(context)
        levels, picked = choose_levels(quantiles, self.levels)
        passes = self.passes(horizon, head)
        if batch < 1:
            raise UserError(f"batch must be at least 1, not {batch}.")
        self._warn_of_cut(series, passes[0].context, horizon)
        names = range(len(series)) if names is None else names
        found = forecast_batches(
            self.model,
            self.forward_context,
            series,
            names,
            passes,
            batch,
            cached,
            progress,
            self.warn_once,
        )
        if found.quantiles_BHQ is None:
            return found
        return Prediction(found.mean_BH, found.quantiles_BHQ[..., picked], levels)

    def predict_df(
        self,
        frame: pd.DataFrame,
        horizon: int,
        *,
        id_column: str | None = None,
        timestamp_column: str | None = None,
        target: str | None = None,
        freq: str | None = None,
        **options: Any,
    ) -> pd.DataFrame:
        """Forecast every series of a long frame; return a long frame with the same column names.

        Columns that are not given are found by name: `unique_id, ds, y` or `item_id, timestamp,
        target`. `freq` is a pandas frequency for times whose step cannot be inferred.
        `options` are those of `predict`.
        """
        import pandas as pd

        from steplab.forecasting.histories import histories_from_frame
        from steplab.forecasting.long_table import long_table

        used = self.passes(horizon, options.get("head", "largest"))[0].context
        names = (id_column, timestamp_column, target)
        # One point more than is used, so that a cut is noticed.
        found = histories_from_frame(frame, names, freq, used + 1)
        for note in found.notes:
            self.warn_once(note)
        prediction = self.predict(list(found.values), horizon, names=found.ids, **options)
        return pd.DataFrame(long_table(found, prediction))

    def gluonts(self, prediction_length: int, **options: Any) -> GluonTSPredictor:
        """Return a predictor for GluonTS datasets; `options` are those of `predict`."""
        from steplab.forecasting.gluonts_predictor import GluonTSPredictor

        return GluonTSPredictor(self, prediction_length, options)

    def warn_once(self, text: str, kind: str = "") -> None:
        """Pass a message on, unless one of its kind was passed on before."""
        if (kind or text) not in self._warned:
            self._warned.add(kind or text)
            self._warn(text)

    def _warn_of_cut(self, series: Sequence[Series], used: int, horizon: int) -> None:
        if any(len(one) > used and np.isfinite(one[:-used]).any() for one in series):
            self.warn_once(
                f"Some contexts are longer than {used:,} points, of which the last {used:,} are "
                f"used: for a horizon of {horizon:,} a model trained on windows of "
                f"{self.model.config.seq_max_len:,} cannot use more.",
                "cut",
            )
