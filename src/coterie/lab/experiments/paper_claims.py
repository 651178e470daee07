"""The claims of the paper about its experiments, and whether they are reproduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple, TypeVar

import numpy as np

from coterie.lab.experiments import paper
from coterie.lab.experiments.paper import EIGHT, FAR, LAM, OURS, PRINTED, SQUARED, WINDOW

Run = TypeVar("Run", paper.First, paper.Second)
#: Largest deviations from the paper's numbers that count as reproduced, and as partly reproduced.
POINTS, MORE_POINTS = 0.005, 0.03  # accuracy
ENDS = 0.05  # ends of the window, relative
CONVERGED, CLOSE = 1e-6, 1e-2  # relative gap of Algorithm 1
SAME = 1e-6  # models closer than this are equal


class Verdict(Enum):
    """Whether a claim is reproduced."""

    YES = "reproduced"
    PARTLY = "partly"
    NO = "not reproduced"


class Claim(NamedTuple):
    """A statement of the paper and its reproduction: with seed 0, which decides the verdict, and
    over all seeds.
    """

    number: int
    experiment: str
    text: str
    paper: str
    ours: str
    seeds: str
    verdict: Verdict


#: The part of a claim that is computed: here with seed 0, over all seeds, and the verdict.
Check = tuple[str, str, Verdict]


def claims(results: paper.Results) -> tuple[Claim, ...]:
    """Check every claim of the paper.

    Parameters
    ----------
    results
        The results of `reproduce`.

    Returns
    -------
    tuple[Claim, ...]
        All claims, with their verdicts.
    """
    checked = [*_of_first(results.first), *_of_second(results.second, results.same),
               ("3", "Algorithm 1 with 40 % of the users in a round converges to the optimum",
                "converges", _converges(results))]
    return tuple(Claim(k, experiment, text, paper, *check)
                 for k, (experiment, text, paper, check) in enumerate(checked, 1))


#: Experiment, claim, what the paper says, and what is found here.
_Row = tuple[str, str, str, Check]


def _of_first(first: Sequence[paper.First]) -> list[_Row]:
    """The claims of Experiment 1."""
    rows = [
        ("For large lambda all users share one model, the global one", "consensus",
         _consensus(first)),
        ("The squared penalty reaches the global model only asymptotically", "never exactly",
         _asymptotic(first)),
        ("This method personalises: above the global model for some lambda", "yes",
         _above(first, _best, "global")),
        ("This method generalises: above local models for some lambda", "yes",
         _above(first, _best, "local")),
        ("The squared penalty personalises", "yes", _above(first, _best_squared, "global")),
        ("The squared penalty generalises", "yes", _above(first, _best_squared, "local")),
        ("The oracle, which knows the clusters, is best of all", "expected", _oracle(first)),
        ("Best accuracy of this method", "86.8 %", _number(first, _best, 0.868)),
        ("Best accuracy of the squared penalty", "86.6 %", _number(first, _best_squared, 0.866)),
        ("The highest accuracy is this method's: comparable to, or slightly above, the squared "
         "penalty's", "+0.2 points", _margin(first)),
        ("Models of one cluster move apart as lambda falls", "yes", _monotone(first)),
        ("Clusters are more compact than the squared penalty's at every lambda", "every lambda",
         _compact(first)),
        ("Equal models inside clusters, and three clusters, for lambda in a window",
         f"({WINDOW[0]:g}, {WINDOW[1]:g})", _window(first)),
        ("The number of distinct models falls from N to K; the squared penalty keeps N", "60 to 3",
         _fewer(first))]
    return [("1", *row) for row in rows]


def _of_second(second: Sequence[paper.Second], same: Sequence[paper.Second]) -> list[_Row]:
    """The claims of Experiment 2, on its own ellipses and on those of Experiment 1."""
    lam_text = " / ".join(f"{lam:g}" for lam in EIGHT[1:5])
    rows = [
        ("One model at lambda = 1000 and 1", "1, 1", _counts(second, (0, 1), (1, 1))),
        ("Two models at lambda = 0.12", "2", _counts(second, (2,), (2,))),
        ("0.12 is above the bound of Theorem 2, and close to it", "above, close",
         _just_above(second)),
        ("Three models at lambda = 0.08", "3", _counts(second, (3,), (3,))),
        ("0.08 is inside the range of Theorems 1 and 2", "inside", _inside(second)),
        ("Three models at lambda = 0.05", "3", _counts(second, (4,), (3,))),
        ("0.05 is below the bound of Theorem 1, which is conservative", "below", _below(second)),
        ("Inside the range of Theorems 1 and 2 the clusters are always the true ones", "proved",
         _theorems((*second, *same))),
        ("The models found are not optimal, but the clusters are a guide: training inside them is "
         "better", "yes", _guide(second)),
        ("The squared penalty has no consensus even at lambda = 1000", "never", _apart(second)),
        (f"The same on the ellipses of Experiment 1: models at lambda = {lam_text}",
         "1 / 2 / 3 / 3", _counts(same, (1, 2, 3, 4), (1, 2, 3, 3))),
        ("The same on the ellipses of Experiment 1: 0.08 inside, 0.05 below the range of Theorems "
         "1 and 2", "inside, below", _both(same))]
    return [("2", *row) for row in rows]


def _grade(yes: bool, partly: bool = False) -> Verdict:
    return Verdict.YES if yes else Verdict.PARTLY if partly else Verdict.NO


# Experiment 1


def _best(run: paper.First) -> float:
    return float(run.accuracy[OURS].max())


def _best_squared(run: paper.First) -> float:
    return float(run.own_accuracy.max())


def _by_seed(runs: Sequence[Run], holds: Callable[[Run], bool], ours: str,
             partly: bool = False) -> Check:
    """A statement that is true or false for each seed."""
    good = [holds(run) for run in runs]
    return ours, f"{sum(good)} of {len(runs)} seeds", _grade(good[0], partly)


def _mean(values: Sequence[float], unit: str = "%") -> str:
    scale, digits = (100.0, 1) if unit == "%" else (1.0, 2)
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return f"{scale * float(np.mean(values)):.{digits}f} ± {scale * sd:.{digits}f} {unit}"


def _consensus(runs: Sequence[paper.First]) -> Check:
    def holds(run: paper.First) -> bool:
        beyond = run.lams > run.consensus * 1.001
        one = (run.n_clusters[beyond] == 1).all()
        return bool(one and (run.from_global[OURS] <= SAME).all())

    return _by_seed(runs, holds, "one model, the global one, from lambda = "
                                 f"{runs[0].consensus:.4f} on")


def _asymptotic(runs: Sequence[paper.First]) -> Check:
    def holds(run: paper.First) -> bool:
        far = run.from_global[SQUARED]
        return bool((far > SAME).all() and (far[1:] < 0.2 * far[:-1]).all())

    shown = ", ".join(f"{value:.0e}" for value in runs[0].from_global[SQUARED])
    lams = ", ".join(f"{lam:g}" for lam in FAR)
    return _by_seed(runs, holds, f"{shown} from it at lambda = {lams}")


def _above(runs: Sequence[paper.First], best: Callable[[paper.First], float], beside: str) -> Check:
    return _by_seed(runs, lambda run: best(run) > run.flat[beside],
                    f"{best(runs[0]):.1%} at best, {beside} {runs[0].flat[beside]:.1%}")


def _oracle(runs: Sequence[paper.First]) -> Check:
    def others(run: paper.First) -> float:
        return max(_best(run), _best_squared(run), run.flat["global"], run.flat["local"])

    oracle, rest = runs[0].flat["oracle"], others(runs[0])
    return _by_seed(runs, lambda run: run.flat["oracle"] >= others(run),
                    f"{oracle:.1%}, best of the others {rest:.1%}", partly=oracle >= rest - POINTS)


def _number(runs: Sequence[paper.First], of: Callable[[paper.First], float], paper: float) -> Check:
    off = abs(of(runs[0]) - paper)
    return (f"{of(runs[0]):.1%}", _mean([of(run) for run in runs]),
            _grade(off <= POINTS, off <= MORE_POINTS))


def _margin(runs: Sequence[paper.First]) -> Check:
    """Partly: comparable, that is, at most half a point below."""
    gains = [_best(run) - _best_squared(run) for run in runs]
    return (f"{100 * gains[0]:+.2f} points", _mean([100 * gain for gain in gains], "points"),
            _grade(gains[0] > 0, gains[0] >= -POINTS))


def _monotone(runs: Sequence[paper.First]) -> Check:
    """The share of steps between neighbouring lams in which the distance does not grow, for both
    methods.
    """
    def share(run: paper.First) -> float:
        steps = np.concatenate([np.diff(run.distance[name]) for name in (OURS, SQUARED)])
        return float((steps <= SAME).mean())

    ends = [runs[0].distance[name][[0, -1]] for name in (OURS, SQUARED)]
    return _by_seed(runs, lambda run: share(run) == 1.0, f"at {share(runs[0]):.0%} of the steps",
                    partly=all(low > high for low, high in ends))


def _compact(runs: Sequence[paper.First]) -> Check:
    def share(run: paper.First) -> float:
        return float((run.distance[OURS] <= run.distance[SQUARED]).mean())

    worse = runs[0].lams[runs[0].distance[OURS] > runs[0].distance[SQUARED]]
    where = "" if not worse.size else f"; not from {worse.min():.3g} to {worse.max():.3g}"
    return _by_seed(runs, lambda run: share(run) == 1.0,
                    f"at {share(runs[0]):.0%} of the lambdas{where}", partly=share(runs[0]) >= 0.5)


def _window(runs: Sequence[paper.First]) -> Check:
    def near(window: tuple[float, float]) -> bool:
        return all(abs(end / wanted - 1.0) <= ENDS
                   for end, wanted in zip(window, WINDOW, strict=True))

    windows = [run.window for run in runs if run.window is not None]
    text = f"a window in {len(windows)} of {len(runs)} seeds"
    if len(windows) > 1:
        low, high = np.mean(windows, axis=0)
        text += f", {low:.3f} to {high:.3f} on average"
    window = runs[0].window
    if window is None:
        return "none", text, Verdict.NO
    overlap = window[0] < WINDOW[1] and window[1] > WINDOW[0]
    return f"({window[0]:.4f}, {window[1]:.4f})", text, _grade(near(window), overlap)


def _fewer(runs: Sequence[paper.First]) -> Check:
    def least(run: paper.First) -> int:
        """The smallest number of models for which the clusters are the true ones; N if there is
        none.
        """
        return int(run.n_clusters[run.exact].min()) if run.exact.any() else run.n_users

    return _by_seed(runs, lambda run: least(run) == 3 and bool((run.distance[SQUARED] > 0).all()),
                    f"{runs[0].n_clusters.max()} to {least(runs[0])}",
                    partly=int(runs[0].n_clusters.min()) < runs[0].n_users)


# Experiment 2


def _counts(runs: Sequence[paper.Second], indices: Sequence[int], wanted: Sequence[int]) -> Check:
    def hits(run: paper.Second) -> int:
        return sum(int(run.n_clusters[k]) == n for k, n in zip(indices, wanted, strict=True))

    separator = ", " if len(indices) < 4 else " / "
    shown = separator.join(str(int(runs[0].n_clusters[k])) for k in indices)
    return _by_seed(runs, lambda run: hits(run) == len(wanted), shown, partly=hits(runs[0]) > 0)


def _just_above(runs: Sequence[paper.Second]) -> Check:
    """Close: at most 1.5 times the bound, which is that at 0.08, where the three clusters are
    separate.
    """
    def ratio(run: paper.Second) -> float:
        return EIGHT[2] / float(run.upper[3])

    return _by_seed(runs, lambda run: 1.0 < ratio(run) <= 1.5,
                    f"{ratio(runs[0]):.2f} times it ({runs[0].upper[3]:.4f})",
                    partly=ratio(runs[0]) > 1.0)


def _is_inside(run: paper.Second) -> bool:
    return bool(run.lower[3] <= EIGHT[3] < run.upper[3])


def _is_below(run: paper.Second) -> bool:
    return bool(run.lower[4] > EIGHT[4])


def _inside(runs: Sequence[paper.Second]) -> Check:
    return _by_seed(runs, _is_inside, f"[{runs[0].lower[3]:.4f}, {runs[0].upper[3]:.4f})")


def _below(runs: Sequence[paper.Second]) -> Check:
    return _by_seed(runs, _is_below, f"the bound is {runs[0].lower[4]:.4f}")


def _both(runs: Sequence[paper.Second]) -> Check:
    (inside, _, first), (below, _, second) = _inside(runs), _below(runs)
    _, seeds, _ = _by_seed(runs, lambda run: _is_inside(run) and _is_below(run), "")
    return (f"{inside} at 0.08; {below} at 0.05", seeds,
            first if first is second else Verdict.PARTLY)


def _theorems(runs: Sequence[paper.Second]) -> Check:
    exact = [bool(run.exact[k]) for run in runs for k, lam in enumerate(EIGHT)
             if run.lower[k] <= lam < run.upper[k]]
    return (f"{sum(exact)} of {len(exact)} lambdas inside, all seeds", "",
            Verdict.NO if not all(exact) else _grade(bool(exact), True))


def _guide(runs: Sequence[paper.Second]) -> Check:
    return _by_seed(runs, lambda run: bool(run.refitted[3] > run.accuracy[3]),
                    f"{runs[0].accuracy[3]:.1%} as they are, {runs[0].refitted[3]:.1%} refitted, "
                    "at 0.08")


def _apart(runs: Sequence[paper.Second]) -> Check:
    def far(run: paper.Second) -> float:
        return float(paper.pair_distances(run.squared[0]).max())

    return _by_seed(runs, lambda run: far(run) > SAME,
                    f"models up to {far(runs[0]):.1e} apart at 1000")


# Experiment 3


def _converges(results: paper.Results) -> Check:
    best = results.optimum
    printed = next(curve for curve in results.curves if curve.name == PRINTED)
    others = "; ".join(f"{one.name}: {max(one.gaps[-1] / best, 1e-16):.0e} after "
                       f"{one.rounds[-1]:,}" for one in results.curves if one is not printed)
    gap, half = printed.gaps[-1] / best, np.searchsorted(printed.rounds, printed.rounds[-1] / 2)
    earlier = f"{printed.gaps[half] / best:.1e} after {printed.rounds[half]:,} rounds"
    return (f"relative gap {earlier}, {gap:.1e} after {printed.rounds[-1]:,}, lambda = {LAM:g}",
            others, _grade(gap <= CONVERGED, gap <= CLOSE))
