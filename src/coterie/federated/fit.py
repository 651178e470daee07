"""The fit of a federation: what `coterie fit` does for a table, where the data stay with their
users.

1. Nodes introduce themselves and agree on a recipe (`coterie.federated.agreement`).
2. With squared losses, every user sends the second moments of its rows, once for the held-out ones
   and once for the others. They decide everything: the server makes users with the same moments
   (`coterie.data.condensed`) and calls the `fit` of a table with them.
3. Every user answers for the certificate, from its own rows.
4. Every user gets its model, and says how models that were found without its held-out rows score on
   these.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.storage import write_atomically
from coterie.base.types import Array, Flags, Ints
from coterie.data.condensed import SecondMoments
from coterie.data.encoding import Recipe
from coterie.data.merging import merge
from coterie.data.users import Split, Users
from coterie.federated import plausible
from coterie.federated.agreement import (
    Agreement,
    Carrier,
    bounded_classes,
    introduced,
    read_aside,
    write_aside,
)
from coterie.federated.algorithms.base import Participation
from coterie.federated.algorithms.proof import Judgement, judged
from coterie.federated.config import DataSettings
from coterie.federated.fit_by_asking import describe, fit_parts
from coterie.federated.introduction import Introduction
from coterie.federated.protocol.messages import Ragged, square, triangle
from coterie.federated.session import Round, Session, SetAside
from coterie.fitting.estimate import Fit, fit
from coterie.fitting.scores import Scores
from coterie.fitting.settings import Settings
from coterie.fitting.work import FitProgress
from coterie.losses import Personal
from coterie.losses.derived import Remote
from coterie.problem.account import Account
from coterie.problem.certificates import Answers, answers_of, project, reference
from coterie.problem.solution import Solution, Status

log = logging.getLogger("coterie.federated")
_T = TypeVar("_T")
_CONTRADICTS = 1e-4  # relative, of a loss that follows from second moments, too
# Times the tolerance: a part of the gap that one user is refused for, if the others' is within it.
_BY_FAR = 1e3


@dataclass(frozen=True, kw_only=True, eq=False)
class Carriage:
    """How the questions of a fit are carried.

    Parameters
    ----------
    participation, seed : who is asked in a round.
    checkpoint : a folder in which answers are kept; a fit started again with it continues.
    n_users, wait : how many users to wait for, and how many seconds.
    progress : called after every round.
    fit_progress : called with what the server is doing.
    """

    participation: Participation = field(default_factory=Participation)
    seed: int = 0
    checkpoint: str | os.PathLike[str] | None = None
    n_users: int = 0
    wait: float = 120.0
    progress: Callable[[Round], None] | None = None
    fit_progress: FitProgress | None = None


def fit_federation(runtime: Carrier, data: DataSettings, settings: Settings,
                   carriage: Carriage | None = None) -> Fit:
    """Agree, ask, fit and certify, over any runtime.

    Parameters
    ----------
    runtime : finds the users and carries the queries.
    data : what is asked of the data.
    settings : of the fit; of a table, its task follows from the columns.
    carriage : how the questions are carried.

    Raises
    ------
    Incompatible : users who do not come or do not answer, or nodes whose data do not fit together.
    InvalidInput : data or settings that cannot be used.
    """
    carriage = carriage or Carriage()
    agreement, settings = _agreement(runtime, data, settings, carriage)
    runtime.use(agreement)
    asker = Session(runtime, agreement.names, participation=carriage.participation,
                  seed=carriage.seed, fingerprint=_fingerprint(settings, runtime),
                  checkpoint=carriage.checkpoint, progress=carriage.progress, ridge=settings.ridge)
    (fitted, solution, scores), agreement, aside = without_refusers(
        asker, agreement, carriage, lambda: _fingerprint(settings, runtime),
        lambda agreed: _asked(runtime, asker, agreed, settings, carriage))
    return replace(fitted, solution=solution, scores=scores, recipe=agreement.recipe,
                   account=account_of(asker, aside))


def account_of(asker: Session, aside: dict[Any, str], **more: Any) -> Account:
    """What the questions took, and who took no part."""
    return Account(ledger=asker.ledger, history=tuple(asker.history),
                   refusals=tuple(asker.refusals), aside=aside, **more)


def without_refusers(asker: Session, agreement: Agreement, carriage: Carriage,
                     fingerprint: Callable[[], dict[str, Any]],
                     attempt: Callable[[Agreement], _T]) -> tuple[_T, Agreement, dict[Any, str]]:
    """What is found with all users but those whose nodes refuse, or whose answers cannot be true.

    Parameters
    ----------
    asker : of the run.
    agreement : of all who came.
    carriage : how the questions are carried.
    fingerprint : what must agree for answers in a checkpoint to be used.
    attempt : asks and computes; made again without those who are set aside.

    Returns
    -------
    What `attempt` gave, the agreement of those who are left, and the reasons of the others.
    """
    runtime: Any = asker.runtime
    folder, aside = None if carriage.checkpoint is None else Path(carriage.checkpoint), \
        dict(agreement.refused)
    if folder is not None:
        aside |= read_aside(folder)
        write_aside(folder, aside)
    while True:
        try:
            with _blaming(asker):
                return attempt(agreement), agreement, aside
        except SetAside as refusal:  # the others are fitted without them
            log.warning("round %d: %s", asker.turn, refusal)
            aside |= refusal.reasons
            agreement = replace(agreement, names=tuple(name for name in agreement.names
                                                       if name not in aside))
            if not agreement.names:
                raise
            if folder is not None:
                write_aside(folder, aside)
                write_atomically(folder / "federation.json", agreement.to_json().encode(),
                                 durable=True)
            runtime.use(agreement)
            runtime.begin(f"without-{len(aside)}")
            asker.leave_out(refusal.reasons, fingerprint())


@contextlib.contextmanager
def _blaming(asker: Session) -> Iterator[None]:
    """Numbers that cannot be computed with set their user aside, where they are beyond all
    proportion.
    """
    try:
        yield
    except (np.linalg.LinAlgError, ArithmeticError, InvalidInput) as error:
        blamed = asker.suspect(error)
        if blamed is None:
            raise
        raise blamed from error


def _fingerprint(settings: Settings, runtime: Carrier) -> dict[str, Any]:
    """What must agree for answers in a checkpoint to be used."""
    return {**{f.name: getattr(settings, f.name) for f in fields(settings)}, **runtime.identity()}


def _asked(runtime: Carrier, asker: Session, agreement: Agreement, settings: Settings,
           carriage: Carriage) -> tuple[Fit, Solution, Scores | None]:
    """The fit of all who take part, its certified solution, and its scores."""
    if _squared(settings):
        users, split = _second_moments(asker, agreement, settings)
        fitted = fit(users, settings, split=split, progress=carriage.fit_progress)
        runtime.use(replace(agreement, units=fitted.units))
        sizes = fitted.solution.problem.users.data.sizes
    else:
        facts = describe(asker, agreement, settings)
        runtime.use(replace(agreement, units=facts.units, train_units=facts.train_units))
        fitted, sizes = fit_parts(facts, agreement.participants, asker, settings), facts.sizes[0]
    solution = _certified(asker, fitted.solution, settings.tol, sizes)
    return fitted, solution, _judged(asker, fitted)


def _agreement(runtime: Carrier, data: DataSettings, settings: Settings,
               carriage: Carriage) -> tuple[Agreement, Settings]:
    """Who takes part and what the columns are, settled at the first start and kept for later ones;
    and the task.
    """
    file = None if carriage.checkpoint is None else Path(carriage.checkpoint) / "federation.json"
    if file is not None and file.exists():
        agreement = Agreement.from_json(file.read_text(encoding="utf-8"))
    else:
        nodes, agreement = introduced(runtime, carriage.n_users, carriage.wait)
        tables = [node.summary for _, node in nodes if node.summary is not None]
        if tables:
            recipe = Recipe.from_summary(merge(tables, tables=[label for label, _ in nodes]))
            agreement = replace(agreement, recipe=recipe, features=recipe.feature_names,
                                task=recipe.task, n_classes=len(recipe.classes))
        else:
            agreement = _prepared(agreement, nodes, settings)
        if file is not None:
            write_atomically(file, agreement.to_json().encode(), durable=True)
    return agreement, replace(settings, task=agreement.task, n_classes=max(agreement.n_classes,
        settings.n_classes),
                              standardize=data.scaled(table=True))


def _prepared(agreement: Agreement, nodes: list[tuple[str, Introduction]],
              settings: Settings) -> Agreement:
    """The task of prepared numbers: by the loss named, or by the targets."""
    kinds = {node.targets for _, node in nodes}
    signs = kinds == {"signs"}
    task = {"logistic": "classification", "squared_hinge": "classification",
            "multinomial": "classification", "poisson": "counts", "squared": "regression",
            "huber": "regression"}.get(settings.loss, "")
    if "none" in kinds:
        if len(kinds) > 1:
            raise InvalidInput("some nodes have targets and others have none",
                               remedy="Give all of them targets")
        return replace(agreement, task="clustering")
    task = task or ("classification" if signs else "regression")
    n_classes, agreement = bounded_classes(agreement, nodes) if task == "classification" else (0,
        agreement)
    return replace(agreement, task=task, signs=signs and task == "classification",
                   n_classes=2 if signs else n_classes)


def _squared(settings: Settings) -> bool:
    """Whether second moments decide everything."""
    losses = ("auto", "squared", "squared_distance")
    if settings.task in ("regression", "clustering") and settings.loss in losses:
        return True
    if (settings.task == "clustering" or settings.loss == "huber" or settings.weights != "auto"
        or settings.lam != "auto" or not settings.standardize):
        raise InvalidInput("a federation cannot be fitted like this: outside of squared losses it "
                           "needs standardised "
                           "features, automatic weights and lam, and a loss other than Huber's",
                           remedy="Leave these settings out, or give lam a number")
    return False


def _second_moments(asker: Session, agreement: Agreement, settings: Settings) -> tuple[Users,
        Split | None]:
    """Users with the second moments of those who take part: of all rows, and of their parts."""
    replies, q = asker.ask("moments", 0), len(agreement.features) + (settings.task != "clustering")
    counts, means, scatters = (replies.arrays[name] for name in ("count", "means", "scatter"))
    n, k = len(agreement.names), counts.shape[1]
    if means.shape != (n, k, q) or scatters.shape != (n, k, q * (q + 1) // 2):
        raise InvalidInput("the users' moments are of other columns than agreed",
                           remedy="Start the run again")
    squares = [square(scatters[:, j], q) for j in range(k)]
    asker.refuse(*(plausible.wrong_scatters(counts[:, j], means[:, j], squares[j])
                   for j in range(k)))
    asker.refuse(*(plausible.outlying(counts[:, j], means[:, j], np.einsum("nqq->nq", squares[j]))
                   for j in range(k)))
    parts = [SecondMoments(counts[:, j].astype(np.int64), means[:, j], squares[j])
             for j in range(k)]
    everything = parts[0] if k == 1 else parts[0].add(parts[1])
    users = everything.users(agreement.names, agreement.features)
    if k == 1:
        return users, None
    train, test = (part.users(agreement.names, agreement.features) for part in parts)
    return users, Split(train, test.take([]), test)


def _certified(asker: Session, solution: Solution, tol: float, sizes: Ints) -> Solution:
    """The solution with a certificate from the users' own rows."""
    began, problem = time.perf_counter(), solution.problem
    graph, n = problem.graph, problem.n_users
    loss = problem.loss.loss if isinstance(problem.loss, Remote) else problem.loss
    duals = (np.zeros((graph.n_edges, problem.dim)) if solution.duals is None
             else project(solution.duals, problem.radii))
    slopes, about = -graph.divergence(duals), reference(graph, solution.models)
    shared, ragged = dict[str, Array](), dict[str, Ragged]()
    if isinstance(loss, Personal):
        shared["covariance"] = triangle(np.asarray(loss.covariance)[None])
        if isinstance(loss.scale, np.ndarray):
            ragged["noise"] = Ragged.of(loss.scale * sizes, np.ones(n, dtype=np.int64))
    replies = asker.ask("certify", problem.dim, arrays={"model": solution.models, "slope": slopes,
                                                        "anchor": about},
                        shared=shared, ragged=ragged)
    answers = Answers(*(replies.arrays[name] for name in ("value", "conjugate", "residual", "size",
                                                          "rounding")))
    judgement = judged(problem, solution.models, slopes, about, answers)
    asker.refuse(_wrong_answers(solution, slopes, about, answers), _to_blame(judgement, tol))
    certificate = judgement.certificate.with_duals(duals)
    gap = certificate.relative_gap
    status = (Status.CONVERGED if gap <= tol else Status.INACCURATE
              if np.isfinite(certificate.bound) else Status.NO_BOUND)
    return replace(solution, certificate=certificate, status=status, duals=duals,
                   seconds=solution.seconds + time.perf_counter() - began)


def _wrong_answers(solution: Solution, slopes: Array, about: Array, answers: Answers) -> Flags:
    """Whose value and conjugate contradict each other or, where second moments decide everything,
    these.
    """
    products = np.einsum("nd,nd->n", slopes, solution.models - about)
    wrong = plausible.beyond_conjugate(answers.values, answers.conjugates, products,
                                       answers.rounding)
    if isinstance(solution.problem.loss, Remote):
        return wrong
    known = answers_of(solution.problem.loss, solution.problem.samples, solution.models, slopes,
                       about)
    slack = _CONTRADICTS * (known.sizes + np.abs(known.values))
    return wrong | (np.abs(answers.values - known.values) > slack)


def _to_blame(judgement: Judgement, tol: float) -> list[str]:
    """The user because of whom alone the certificate fails, by far."""
    reasons = [""] * len(judgement.own)
    if judgement.without_worst <= tol and np.inf > judgement.share > _BY_FAR * tol:
        reasons[judgement.worst] = ("the certificate fails because of its replies alone: its part "
                                    "of the gap is "
                                    f"{judgement.own[judgement.worst]:.1e}")
    return reasons


def _judged(asker: Session, fitted: Fit) -> Scores | None:
    """The scores as the users compute them; every user gets its model with the same question."""
    scores, dim, models = fitted.scores, fitted.solution.problem.dim, fitted.models
    others = [models] * 3
    if scores is not None and scores.judged is not None:
        theirs = scores.judged
        others = list(theirs[1:])
        if fitted.sent is None:  # users judge in the units of all rows
            others = [fitted.units.restored(theirs.units.coefficients(part)) for part in others]
    replies = asker.ask("judge", dim, arrays={"model": models, "fitted": others[0],
                                              "alone": others[1], "together": others[2]})
    if scores is None:
        return None
    fitted_score, alone, together = replies.arrays["scores"].T
    worse = np.asarray(replies.arrays["worse"]) > 0
    points = scores.points.copy()
    points[scores.chosen] = fitted_score
    return replace(scores, fitted=fitted_score, alone=alone, together=together, worse=worse,
                   points=points)

