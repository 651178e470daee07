"""From users to groups and models with nothing left to choose."""

from coterie.fitting.estimate import Fit, Scores, fit
from coterie.fitting.plan import Settings
from coterie.fitting.prepare import Prepared, prepare
from coterie.fitting.units import Units, UserStatistics

__all__ = ["Fit", "Prepared", "Scores", "Settings", "Units", "UserStatistics", "fit", "prepare"]
