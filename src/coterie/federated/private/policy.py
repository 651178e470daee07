"""What a private federation promises and to whom, and what noisy releases cost: the Gaussian
mechanism, exactly.

A release with sensitivity D (the largest change of the answer when one row is added or removed) and
normal noise of standard deviation tau has mu = D / tau. It is (epsilon, delta)-differentially
private if and only if

    delta >= delta_of(epsilon, mu) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)

(Balle and Wang 2018), and several releases are together one with mu = sqrt(sum of mu_k^2) (Dong,
Roth and Su 2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from coterie.base.errors import InvalidInput, require

_LARGEST = 1e6  # of mu and of epsilon that are searched
Range = tuple[float, float]
TARGET = "target"  # the name of the target in `clip` where it has no other
_RANGES, _CENTRES = 0.1, 0.1  # shares of mu^2 for what scaling needs; the rest is for the summary


def delta_of(epsilon: float, mu: float) -> float:
    """The least delta for which a release with `mu` is (epsilon, delta)-differentially private.

    Example
    -------
    >>> round(delta_of(1.0, 0.5), 5)
    0.00683
    """
    from scipy.special import log_ndtr

    if mu <= 0:
        return 0.0
    first, second = float(log_ndtr(mu / 2 - epsilon / mu)), \
        epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return math.exp(first) * -math.expm1(min(second - first, 0.0)) if math.isfinite(first) else 0.0


def mu_of(epsilon: float, delta: float) -> float:
    """The largest mu that is (epsilon, delta)-differentially private, from below.

    Raises
    ------
    InvalidInput : an epsilon that is not positive, or a delta outside (0, 1).

    Example
    -------
    >>> round(mu_of(4.0, 1e-5), 4)
    0.9249
    """
    check(epsilon, delta)
    low, high = 0.0, 1.0
    while delta_of(epsilon, high) <= delta and high < _LARGEST:
        low, high = high, 2 * high
    return _bisected(low, high, lambda mu: delta_of(epsilon, mu) <= delta)


def epsilon_of(mu: float, delta: float) -> float:
    """The least epsilon for which a release with `mu` is (epsilon, delta)-differentially private,
    from above.

    Example
    -------
    >>> round(epsilon_of(mu_of(4.0, 1e-5), 1e-5), 6)
    4.0
    """
    check(1.0, delta)
    if delta_of(0.0, mu) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while delta_of(high, mu) > delta:
        low, high = high, 2 * high
        if high > _LARGEST:
            return math.inf
    return -_bisected(-high, -low, lambda minus: delta_of(-minus, mu) <= delta)


def composed(mus: Iterable[float]) -> float:
    """The mu of several releases together."""
    return math.hypot(*mus)


def check(epsilon: float, delta: float) -> None:
    """Refuse what is no privacy budget."""
    require(math.isfinite(epsilon) and epsilon > 0,
            f"epsilon must be a positive number, got {epsilon!r}", "Use for example 4")
    require(0 < delta < 1, f"delta must lie between 0 and 1, got {delta!r}",
            "Use for example 1e-5, less than one by the number of rows of a user")


def _bisected(low: float, high: float, good: Callable[[float], bool]) -> float:
    """The largest number in [low, high] for which a decreasing condition holds, from below."""
    while True:
        middle = 0.5 * (low + high)
        if not low < middle < high:
            return low
        low, high = (middle, high) if good(middle) else (low, middle)


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """Differential privacy for every user towards everybody else, the server included.

    Every user releases one clipped and noisy summary of its rows, and before it what is needed to
    scale columns: sums with more noise. All else is computed from these. Noise comes from the
    operating system, never from the seed of a run, so two private runs differ.

    Parameters
    ----------
    epsilon, delta : the budget of all releases together. With the unit "row", delta should be well
        below one over the number of rows of a user.
    clip : public bounds of columns: a number c for [-c, c] in all columns; or for each column, by
        name, its range (low, high) or, for texts of a table, the list of its levels. The target of
        `Users` is called "target". Values outside are moved to the nearest bound. None: bounds are
        found with a tenth of the budget.
    unit : what is protected: "row", one row of a user added or removed; or "user", all rows of a
        user replaced.
    experiment : a seed of the noise, for experiments that are to be repeated. Whoever knows it can
        take the noise away.

    Raises
    ------
    InvalidInput : a budget that is none, or a clip that cannot be used.

    Example
    -------
    >>> privacy = Privacy(epsilon=4.0, delta=1e-5, clip={"age": (0, 100), "target": (0, 1)})
    >>> round(privacy.mu, 4), [round(share, 3) for share in privacy.stages]
    (0.9249, [0.292, 0.877])
    """

    epsilon: float
    delta: float = 1e-5
    clip: float | Mapping[str, Any] | None = None
    unit: Literal["row", "user"] = "row"
    experiment: int | None = None

    def __post_init__(self) -> None:
        check(self.epsilon, self.delta)
        require(self.unit in ("row", "user"),
                f"unit must be 'row' or 'user', got {self.unit!r}", "Use 'row'")
        if isinstance(self.clip, Mapping):
            object.__setattr__(self, "clip", {str(name): _bound(name, bound)
                                              for name, bound in self.clip.items()})
        elif self.clip is not None and not (isinstance(self.clip, (int, float)) and 0 < self.clip
                                            < math.inf):
            raise InvalidInput("clip must be a positive number, or bounds by column, got "
                               f"{self.clip!r}", remedy='Use for example {"age": (0, 100)}')

    @property
    def mu(self) -> float:
        """The budget as a mu of Gaussian differential privacy."""
        return mu_of(self.epsilon, self.delta)

    @property
    def stages(self) -> tuple[float, ...]:
        """The mu of each release; together they have the mu of the budget."""
        first = _RANGES if self.clip is None else 0.0
        shares = [share for share in (first, _CENTRES, 1.0 - first - _CENTRES) if share]
        return tuple(self.mu * math.sqrt(share) * (1 - 1e-12) for share in shares)

    def range_of(self, name: str) -> Range | None:
        """The public bounds of a column of numbers.

        Parameters
        ----------
        name : of the column.

        Returns
        -------
        The lowest and the highest value; None where there are no bounds.
        """
        if isinstance(self.clip, Mapping):
            bound = self.clip.get(name)
            return bound if bound is None or isinstance(bound[0], float) else None
        return None if self.clip is None else (-float(self.clip), float(self.clip))

    def levels_of(self, name: str) -> tuple[str, ...]:
        """The public levels of a column of texts.

        Parameters
        ----------
        name : of the column.

        Returns
        -------
        The levels; empty where there are none.
        """
        bound = self.clip.get(name) if isinstance(self.clip, Mapping) else None
        return () if bound is None or isinstance(bound[0], float) else tuple(bound)

    @property
    def clip_text(self) -> str:
        """`clip` as the text that `parse_clip` reads."""
        if not isinstance(self.clip, Mapping):
            return "" if self.clip is None else f"{self.clip:g}"
        texts = {name: "|".join(bound) if isinstance(bound[0], str)
                 else f"{bound[0]:g}:{bound[1]:g}" for name, bound in self.clip.items()}
        return ", ".join(f"{name}={text}" for name, text in texts.items())

    def statement(self) -> Statement:
        """What is promised, for run.json and the page.

        Returns
        -------
        The statement.
        """
        row = self.unit == "row"
        noise = ("from the operating system's entropy" if self.experiment is None else "from the "
                 f"known seed {self.experiment}: an experiment, which protects nobody")
        return Statement(
            epsilon=self.epsilon, delta=self.delta, unit=self.unit, mu=self.mu,
            releases=len(self.stages), neighbours="one row of one user is added or removed"
            if row else "all rows of one user are replaced",
            clip="bounds of columns were found with a tenth of the budget" if self.clip is None
            else "bounds of columns are public and were given", noise=noise, trust="Nobody but "
            "the user's own node: noise is added there, before anything leaves.", public="names "
            "of users, names and kinds of columns" + ("" if row else ", and nothing else"),
            home="A model that a user finishes at home from its exact rows is for this "
            "user alone. Towards all others the promise holds (joint differential privacy); "
            "who gets the model of a user, or predictions of it, may learn of that user's rows.",
            proves="The certificate proves that the models are optimal for the released "
            "statistics. It says nothing of how near these are to the rows.")


class Statement(NamedTuple):
    """What a private run promises, in numbers and sentences."""

    epsilon: float
    delta: float
    unit: str
    mu: float
    releases: int
    neighbours: str
    clip: str
    noise: str
    trust: str
    public: str
    home: str
    proves: str

    def __str__(self) -> str:
        return (f"Differentially private with epsilon = {self.epsilon:g} "
                f"and delta = {self.delta:g} if {self.neighbours} (all {self.releases} "
                f"releases together); {self.clip}. Noise comes {self.noise}. {self.proves}")


def _bound(name: Any, bound: Any) -> tuple[Any, ...]:
    """A range of numbers, or the levels of a column."""
    try:
        parts = tuple(bound)
        if parts and all(isinstance(part, str) for part in parts) and not isinstance(bound, str):
            if len(set(parts)) == len(parts) > 1:
                return parts
            raise ValueError
        low, high = map(float, parts)
        if math.isfinite(low) and math.isfinite(high) and low < high:
            return low, high
    except (TypeError, ValueError):
        pass
    raise InvalidInput(f"the bounds of column {name!r} must be (low, high) or a list of different "
                       f"texts, got {bound!r}", remedy="Use for example (0, 100), or ['no', 'yes']")


def parse_clip(text: str) -> float | dict[str, Any] | None:
    """The `clip` that a text says: empty, a number, or "age=0:100, sex=f|m, y=0:1".

    Raises
    ------
    InvalidInput : a text that says none.

    Example
    -------
    >>> parse_clip("age=0:100, sex=f|m")
    {'age': (0.0, 100.0), 'sex': ('f', 'm')}
    """
    if not text.strip():
        return None
    try:
        if "=" not in text:
            return float(text)
        parts = dict(part.rsplit("=", 1) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise InvalidInput(f"clip cannot be read: {text!r}",
                           remedy="Use for example age=0:100, sex=f|m, y=0:1") from error
    return {name.strip(): _bound(name.strip(),
                                 [end.strip() for end in bound.split("|")] if "|" in bound else
                                 _numbers(bound)) for name, bound in parts.items()}


def _numbers(text: str) -> Any:
    """low and high of "low:high"; the text itself where it says something else."""
    try:
        return [float(end) for end in text.split(":")]
    except ValueError:
        return text
