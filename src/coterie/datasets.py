"""Simulated users with known groups, and loaders of real ones; the code is in
`coterie.data.simulated`.
"""

from coterie.data.simulated import (
           FAMILIES,
           Dataset,
           Ellipses,
           clustered,
           ellipses,
           gaussian_mixture,
           load,
           two_moons,
)

__all__ = ["FAMILIES", "Dataset", "Ellipses", "clustered", "ellipses", "gaussian_mixture", "load",
           "two_moons"]
