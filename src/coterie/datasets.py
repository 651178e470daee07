"""Simulated users with known groups, and loaders of real ones."""

from coterie.data.simulated import *  # noqa: F403
from coterie.data.simulated import __all__ as __all__
