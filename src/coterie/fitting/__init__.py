"""From users to groups and models with all choices made."""

from coterie.fitting.fit import fit
from coterie.fitting.prepare import Prepared, prepare
from coterie.fitting.result import Fit, RunCertificate, TableSource
from coterie.fitting.scores import Scores
from coterie.fitting.settings import Settings
from coterie.fitting.units import Units, UserStatistics

__all__ = ["Fit", "Prepared", "RunCertificate", "Scores", "Settings", "TableSource", "Units",
           "UserStatistics", "fit",
           "prepare"]
