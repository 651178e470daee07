"""Arrays by what they hold; every module takes the names from here."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Indices = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]
