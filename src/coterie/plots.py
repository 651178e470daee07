"""Figures of results, as `coterie.output.plots` has them."""

from coterie.output.plots import *  # noqa: F403
from coterie.output.plots import __all__ as __all__
