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
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.types import Array, Flags, Ints
from coterie.data.condensed import SecondMoments
from coterie.data.users import Split, Users
from coterie.federated import plausible
from coterie.federated.agreement import (
    Agreement,
    Carrier,
    agree,
    read_aside,
    write_agreement,
    write_aside,
)
from coterie.federated.algorithms.proof import Judgement, judged
from coterie.federated.fit_by_asking import describe, fit_parts
from coterie.federated.private.federation import Releases, check_promise
from coterie.federated.private.policy import Privacy
from coterie.federated.private.release import finished_at_home
from coterie.federated.protocol.messages import Ragged, square, triangle
from coterie.federated.runtimes.nodes import LocalNodes
from coterie.federated.session import Round, Session, SetAside
from coterie.federated.settings import Deployment, FederationSettings
from coterie.fitting.estimate import Fit, fit
from coterie.fitting.scores import Scores
from coterie.fitting.settings import Settings
from coterie.losses import Personal
from coterie.losses.derived import Remote
from coterie.problem.account import Account
from coterie.problem.certificates import Answers, answers_of, project, reference
from coterie.problem.solution import Solution, Status

log = logging.getLogger("coterie.federated")
_CONTRADICTS = 1e-4  # relative, of a loss that follows from second moments, too
# Times the tolerance: a part of the gap that one user is refused for, if the others' is within it.
_BY_FAR = 1e3


def fit_federation(runtime: Carrier, deployment: Deployment, settings: Settings,
                   run: FederationSettings | None = None, privacy: Privacy | None = None,
                   progress: Callable[[Round], None] | None = None) -> Fit:
    """Agree, ask, fit and certify, over any runtime.

    Parameters
    ----------
    runtime : finds the users and carries the queries.
    deployment : what is asked of the data, and how many users to wait for.
    settings : of the fit; of a table, its task follows from the columns.
    run : who is asked in a round, by which seed, and the checkpoint; a fit that is started again
        with it continues.
    privacy : what is promised to users; None without noise.
    progress : called after every round.

    Raises
    ------
    Incompatible : users who do not come or do not answer, or nodes whose data do not fit together.
    InvalidInput : data or settings that cannot be used, or that cannot be private.
    """
    run = run or FederationSettings()
    folder = None if run.checkpoint is None else Path(run.checkpoint)
    if privacy is not None:
        check_promise(privacy, deployment, folder)
        if isinstance(runtime, LocalNodes):
            runtime.private, runtime.experiment = True, privacy.experiment
    # 1. Who takes part, and what the columns are.
    agreement = agree(runtime, deployment, settings, privacy, folder)
    if privacy is None:
        settings = replace(settings, task=agreement.task, standardize=deployment.scaled(table=True),
                           n_classes=max(agreement.n_classes, settings.n_classes))
    runtime.use(agreement)

    def fingerprint() -> dict[str, Any]:
        """What must agree for answers in a checkpoint to be used."""
        if privacy is None:
            return {**{f.name: getattr(settings, f.name) for f in fields(settings)},
                    **runtime.identity()}
        promised = {"epsilon": privacy.epsilon, "delta": privacy.delta, "unit": privacy.unit,
                    "task": agreement.task}
        return promised if isinstance(runtime, LocalNodes) else promised | runtime.identity()

    session = Session(runtime, agreement.names, participation=run.participation, seed=run.seed,
                      fingerprint=fingerprint(), checkpoint=folder, progress=progress,
                      ridge=0.0 if privacy is not None else settings.ridge)
    releases = None if privacy is None else Releases(privacy, folder)

    # 2. The fit of all who take part, with its certificate and scores.
    def attempt(agreed: Agreement) -> Fit:
        if releases is not None:
            return releases.fit(session, agreed, settings)
        return _fit(runtime, session, agreed, settings)

    found, aside = _without_refusers(session, agreement, folder, fingerprint, attempt)
    at_home = None
    if releases is not None and releases.home is not None and isinstance(runtime, LocalNodes):
        at_home = finished_at_home(runtime.data.loss, runtime.data.samples, releases.home)
    account = Account(ledger=session.ledger, history=tuple(session.history),
                      refusals=tuple(session.refusals), aside=aside, privacy=privacy,
                      at_home=at_home)
    return replace(found, account=account)


def _without_refusers(session: Session, agreement: Agreement, folder: Path | None,
                      fingerprint: Callable[[], dict[str, Any]],
                      attempt: Callable[[Agreement], Fit]) -> tuple[Fit, dict[Any, str]]:
    """What is found with all users but those whose nodes refuse, or whose answers cannot be true;
    and the reasons of these.

    `attempt` asks and computes; it is made again without those who are set aside.
    """
    runtime: Any = session.runtime
    aside = dict(agreement.refused)
    if folder is not None:
        aside |= read_aside(folder)
        write_aside(folder, aside)
    while True:
        try:
            with _blaming(session):
                return attempt(agreement), aside
        except SetAside as refusal:  # the others are fitted without them
            log.warning("round %d: %s", session.turn, refusal)
            aside |= refusal.reasons
            names = tuple(name for name in agreement.names if name not in aside)
            agreement = replace(agreement, names=names)
            if not names:
                raise
            if folder is not None:
                write_aside(folder, aside)
                write_agreement(folder, agreement)
            runtime.use(agreement)
            runtime.begin(f"without-{len(aside)}")
            session.leave_out(refusal.reasons, fingerprint())


@contextlib.contextmanager
def _blaming(session: Session) -> Iterator[None]:
    """Numbers that cannot be computed with set their user aside, where they are beyond all
    proportion.
    """
    try:
        yield
    except (np.linalg.LinAlgError, ArithmeticError, InvalidInput) as error:
        blamed = session.suspect(error)
        if blamed is None:
            raise
        raise blamed from error


def _fit(runtime: Carrier, session: Session, agreement: Agreement, settings: Settings) -> Fit:
    """The fit of all who take part, certified and scored by them."""
    if _squared(settings):
        users, split = _second_moments(session, agreement, settings)
        fitted = fit(users, settings, split=split)
        runtime.use(replace(agreement, units=fitted.units))
        sizes = fitted.solution.problem.users.data.sizes
    else:
        facts = describe(session, agreement, settings)
        runtime.use(replace(agreement, units=facts.units, train_units=facts.train_units))
        fitted, sizes = fit_parts(facts, agreement.participants, session, settings), facts.sizes[0]
    solution = _certify(session, fitted.solution, settings.tol, sizes)
    return replace(fitted, solution=solution, scores=_judge(session, fitted),
                   recipe=agreement.recipe)


def _squared(settings: Settings) -> bool:
    """Whether second moments decide everything."""
    losses = ("auto", "squared", "squared_distance")
    if settings.task in ("regression", "clustering") and settings.loss in losses:
        return True
    if (settings.task == "clustering" or settings.loss == "huber" or settings.weights != "auto"
            or settings.lam != "auto" or not settings.standardize):
        raise InvalidInput("a federation cannot be fitted like this: outside of squared losses it "
                           "needs standardised features, automatic weights and lam, and a loss "
                           "other than Huber's",
                           remedy="Leave these settings out, or give lam a number")
    return False


def _second_moments(session: Session, agreement: Agreement,
                    settings: Settings) -> tuple[Users, Split | None]:
    """Users with the second moments of those who take part: of all rows, and of their parts."""
    q = len(agreement.features) + (settings.task != "clustering")
    replies = session.ask("moments", 0)
    counts, means, scatters = (replies.arrays[name] for name in ("count", "means", "scatter"))
    n, k = len(agreement.names), counts.shape[1]
    if means.shape != (n, k, q) or scatters.shape != (n, k, q * (q + 1) // 2):
        raise InvalidInput("the users' moments are of other columns than agreed",
                           remedy="Start the run again")
    squares = [square(scatters[:, j], q) for j in range(k)]
    session.refuse(*(plausible.wrong_scatters(counts[:, j], means[:, j], squares[j])
                   for j in range(k)))
    session.refuse(*(plausible.outlying(counts[:, j], means[:, j], np.einsum("nqq->nq", squares[j]))
                   for j in range(k)))
    parts = [SecondMoments(counts[:, j].astype(np.int64), means[:, j], squares[j])
             for j in range(k)]
    everything = parts[0] if k == 1 else parts[0].add(parts[1])
    users = everything.users(agreement.names, agreement.features)
    if k == 1:
        return users, None
    train, test = (part.users(agreement.names, agreement.features) for part in parts)
    return users, Split(train, test.take([]), test)


def _certify(session: Session, solution: Solution, tol: float, sizes: Ints) -> Solution:
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
    replies = session.ask("certify", problem.dim, arrays={"model": solution.models, "slope": slopes,
                                                        "anchor": about},
                        shared=shared, ragged=ragged)
    answers = Answers(*(replies.arrays[name] for name in ("value", "conjugate", "residual", "size",
                                                          "rounding")))
    judgement = judged(problem, solution.models, slopes, about, answers)
    session.refuse(_wrong_answers(solution, slopes, about, answers), _to_blame(judgement, tol))
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


def _judge(session: Session, fitted: Fit) -> Scores | None:
    """The scores as the users compute them; every user gets its model with the same question."""
    scores, dim, models = fitted.scores, fitted.solution.problem.dim, fitted.models
    others = [models] * 3
    if scores is not None and scores.judged is not None:
        theirs = scores.judged
        others = list(theirs[1:])
        if fitted.sent is None:  # users judge in the units of all rows
            others = [fitted.units.restored(theirs.units.coefficients(part)) for part in others]
    replies = session.ask("judge", dim, arrays={"model": models, "fitted": others[0],
                                              "alone": others[1], "together": others[2]})
    if scores is None:
        return None
    fitted_score, alone, together = replies.arrays["scores"].T
    worse = np.asarray(replies.arrays["worse"]) > 0
    points = scores.points.copy()
    points[scores.chosen] = fitted_score
    return replace(scores, fitted=fitted_score, alone=alone, together=together, worse=worse,
                   points=points)

