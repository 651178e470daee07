"""From users to groups and models with nothing left to choose."""

from coterie.fitting.estimate import Fit, Scores, fit
from coterie.fitting.plan import Settings

__all__ = ["Fit", "Scores", "Settings", "fit"]
