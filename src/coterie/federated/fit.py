"""The fit of a federation: what `coterie fit` does for a table, where the data stay with their
users.

1. Nodes introduce themselves and agree on a recipe (`coterie.federated.agreement`).
2. With squared losses, every user sends the second moments of its rows, once for the held-out ones
   and once for the others. They decide everything: the server makes users with the same moments
   (`coterie.data.moments`) and calls the `fit` of a table with them.
3. Every user answers for the certificate, from its own rows.
4. Every user gets its model, and says how models that were found without its held-out rows score on
   these.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.labels import many
from coterie.base.storage import packed
from coterie.base.types import Array, Flags, Ints
from coterie.data.encoding import Task
from coterie.data.moments import SecondMoments
from coterie.data.users import Moments, Split, Users
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
from coterie.federated.plausible import Statements
from coterie.federated.private.federation import Releases, keeping_promise
from coterie.federated.private.policy import Privacy
from coterie.federated.private.release import finished_at_home
from coterie.federated.protocol.messages import REFUSES, Ragged, square, triangle
from coterie.federated.runtimes.in_process import LocalNodes
from coterie.federated.session import Round, Session, SetAside
from coterie.federated.settings import Deployment, FederationSettings
from coterie.fitting.averaging import Declined
from coterie.fitting.columns import Answer, ColumnQuestion, HandedAverage
from coterie.fitting.fit import fit, fit_source
from coterie.fitting.result import Fit
from coterie.fitting.scores import Scores
from coterie.fitting.settings import Settings, Work
from coterie.fitting.sources import (
    Around,
    Expanded,
    FitSource,
    Judged,
    RowsFitSource,
    pooled_moments,
    scores_of,
)
from coterie.fitting.units import LARGEST_COUNT, Units, UserStatistics, learn_units
from coterie.groups.summaries import Hypotheses, Reply, Told
from coterie.losses import Loss, Personal
from coterie.problem.account import Account
from coterie.problem.certificates import Answers, answers_of, project, reference
from coterie.problem.problem import Problem
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
    if privacy is None:
        return _fit_federation(runtime, deployment, settings, run, None, progress)
    if isinstance(runtime, LocalNodes):
        runtime.private, runtime.experiment = True, privacy.experiment
    with keeping_promise(privacy, deployment,
                         None if run.checkpoint is None else Path(run.checkpoint)):
        return _fit_federation(runtime, deployment, settings, run, privacy, progress)


def _fit_federation(runtime: Carrier, deployment: Deployment, settings: Settings,
                    run: FederationSettings, privacy: Privacy | None,
                    progress: Callable[[Round], None] | None) -> Fit:
    """The fit, in a folder of which it is known what it promises."""
    began, folder = time.perf_counter(), None if run.checkpoint is None else Path(run.checkpoint)
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
                      fingerprint=fingerprint(), checkpoint=folder, progress=progress)
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
    return replace(found, account=account, seconds=time.perf_counter() - began)


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
    if not _squared(settings):
        source: FitSource = SessionSource(runtime, session, agreement, settings)
        return replace(fit_source(source, settings, Work()), recipe=agreement.recipe)
    # Second moments decide everything.
    users, split = _second_moments(session, agreement, settings)
    points = settings.task == "clustering" and int(users.sizes.max()) == 1
    if settings.lam == settings.weights == "auto" and users.n_users > 1 and not points:
        parts = () if split is None else (split.train, split.test)
        source = MomentsSource(runtime, session, agreement, settings, users, *parts)
        return replace(fit_source(source, settings, Work()), recipe=agreement.recipe)
    fitted = fit(users, settings, split=split)
    runtime.use(replace(agreement, units=fitted.units))
    solution, _ = _certify(session, fitted.solution, settings.tol, users.sizes,
                           {"point": fitted.models})
    return replace(fitted, solution=solution, recipe=agreement.recipe)


class MomentsSource(RowsFitSource):
    """Users with squared losses, whose second moments decide everything; they certify and judge
    with their rows.

    Parameters
    ----------
    runtime, session : carry questions and replies.
    agreement : who takes part.
    settings : of the fit.
    users, kept, test : stand-ins with the same moments, as for `RowsFitSource`.
    """

    def __init__(self, runtime: Carrier, session: Session, agreement: Agreement,
                 settings: Settings, users: Users, kept: Users | None = None,
                 test: Users | None = None) -> None:
        super().__init__(learn_units(users, settings), users, kept, test,
                         None if kept is None else learn_units(kept, settings))
        self.session, self.stand_ins, self.given = session, self.given, []
        runtime.use(replace(agreement, units=self.units,
                            train_units=None if kept is None else self.train_units))

    def moments(self, part: int) -> tuple[Ints, Array, Array]:
        return pooled_moments(self.stand_ins[part])

    def ask_average(self, part: int, question: ColumnQuestion, some: Ints,
                    fields: Answer) -> Iterator[tuple[Ints, Answer]]:
        told = ask_average(self.session, self.dim, part, question, fields)
        yield some, {name: rows[some] for name, rows in told.items()}

    def finish(self, solution: Solution, handed: Array, judged: Judged | None,
               tol: float) -> tuple[Solution, Scores | None]:
        local = super().finish(solution, handed, None, tol)[0]  # its problem checks the answers
        return ask_certificate(self.session, replace(solution, duals=local.duals), handed, judged,
                               tol, self.sizes, self.units.task, local.problem)


def ask_average(session: Session, dim: int, part: int, question: ColumnQuestion,
                fields: Answer) -> Answer:
    """What all users answer for an average.

    Raises
    ------
    Declined : nodes refuse, as their owners may: nobody is set aside for it.
    """
    try:
        told = session.ask("average", dim, arrays=fields, shared={
            "stage": np.array(question.stage), "rank": np.array(part),
            "settings": packed(question.arrays())})
    except SetAside as refusal:
        reasons = refusal.reasons
        if not all(reason.startswith(REFUSES) for reason in reasons.values()):
            raise
        name, reason = next(iter(reasons.items()))
        raise Declined(f"{name!r} does not answer: {reason.removeprefix(REFUSES)}") from refusal
    for name, width in question.widths().items():
        if name not in told.arrays or told.arrays[name].shape[1:] != (
                () if width < 0 else (width,)):
            raise InvalidInput(f"users answer an average with another {name!r} than asked for",
                               remedy="Install the same version of coterie everywhere")
    session.refuse(question.wrong(told.arrays))
    return dict(told.arrays)


def describe(asker: Session, agreement: Agreement,
             settings: Settings) -> tuple[list[Units], list[Ints], float]:
    """Ask for counts, means and sums of squares: units and rows of each user by part, and the mean
    target as the loss sees targets, of the last part.
    """
    replies = asker.ask("facts", 0).arrays
    counts, means, m2, target = (replies[name] for name in ("count", "means", "m2", "target"))
    if means.shape[2:] != (len(agreement.features),) or target.shape[2:] != (3,):
        raise InvalidInput("users describe other columns than agreed", remedy="Start the run again")
    units, sizes, mean = list[Units](), list[Ints](), 0.0
    for k in range(counts.shape[1]):
        asker.refuse(plausible.wrong_moments(counts[:, k], means[:, k], m2[:, k], target[:, k]))
        asker.refuse(plausible.wrong_targets(settings.task, target[:, k, 2], target[:, k, 0],
                                             settings.n_classes,
                                             LARGEST_COUNT))
        asker.refuse(plausible.outlying(counts[:, k], means[:, k], m2[:, k]))
        rows = counts[:, k].astype(np.int64)
        features = plausible.without_dominant(Moments(rows, means[:, k], m2[:, k]))
        statistics = UserStatistics(agreement.features, features,
                                    Moments(rows, target[:, k, :1], target[:, k, 1:2]),
                                    target[:, k, 2])
        units.append(Units.from_moments(statistics, settings.task, loss=settings.loss,
                                        ridge=settings.ridge,
                                        n_classes=settings.n_classes,
                                        standardize=settings.standardize))
        sizes.append(rows)
        mean = units[0].mean_target(rows, target[:, k, 0])
    if len(sizes) > 1:
        _say_unscored(asker, sizes[0] - sizes[1])
    return units, sizes, mean


def _say_unscored(session: Session, held: Ints) -> None:
    """Say at the start what a missing consent costs: users who hold out no rows are not scored."""
    without = int((held == 0).sum())
    if without and getattr(session.runtime, "apart", False):
        log.warning("%s of %s hold out no rows, because these would be too few to send, so their "
                    'models are not scored; their owners can set consent = "hessians" in the node '
                    "configuration.", f"{without:,}", many(len(held), "user"))


class SessionSource:
    """Users who are asked, one round for each question; see `coterie.fitting.sources.FitSource`.

    Parameters
    ----------
    runtime, session : carry questions and replies.
    agreement : who takes part.
    settings : of the fit.
    """

    def __init__(self, runtime: Carrier, session: Session, agreement: Agreement,
                 settings: Settings) -> None:
        self.runtime, self.session, self.agreement = runtime, session, agreement
        self.part_units, self.sizes, mean = describe(session, agreement, settings)
        self.users, self.target_mean = agreement.participants, mean
        self.exact, self.parts, self.given = False, list[Users](), list[Users]()
        self.use(self.part_units[0])
        self.dim = self.loss.dim(self.users)

    def use(self, units: Units) -> None:
        self.units, self.loss = units, units.loss
        train = [replace(part, loss=units.loss) for part in self.part_units[1:]]
        self.runtime.use(replace(self.agreement, units=units,
                                 train_units=train[0] if train else None))
        # What users said of this loss at the last centres, by part, position and covariance.
        self._said: dict[tuple[int, bytes], Statements] = {}

    def _ask(self, kind: str, arrays: dict[str, Array] | None = None, **shared: Any) -> Any:
        values = {name: np.asarray(value) for name, value in shared.items()}
        return self.session.ask(kind, self.dim, arrays=arrays, shared=values).arrays

    def summary(self, centre: Array, covariance: Array, noise: float, n_parts: int) -> Reply:
        told = self._ask("summary", centre=centre, covariance=triangle(covariance[None]),
                         step=noise, rank=n_parts)
        reply = Reply(told["model"], told["values"], told["gradient"],
                      square(told["hessian"], self.dim), told["information"], told["size"])
        strength = np.linalg.inv(covariance)
        for k, rows in enumerate(self.sizes[::-1][:n_parts]):
            pull = (reply.point[:, k] - centre) @ strength * (noise / np.maximum(rows, 1))[:, None]
            self.session.refuse(plausible.wrong_points(reply.point[:, k], reply.gradient[:, k],
                                                       reply.hessian[:, k], pull))
        return reply

    def evidence(self, asked: list[Hypotheses]) -> list[Told]:
        centres, covariances = _padded([each[:2] for each in asked])
        n_slopes = max(each.n_slopes for each in asked)
        told = self._ask("evidence", {"centre": centres}, covariance=triangle(covariances),
                         step=np.array([each.noise for each in asked]), rank=n_slopes)
        return [Told(told["evidence"][:, k, :len(each.covariances)],
                     told["gradient"][:, k, :each.n_slopes]) for k, each in enumerate(asked)]

    def around(self, asked: list[Around]) -> list[Expanded]:
        centres, covariances = _padded([each[:2] for each in asked])
        told = self._ask("around", {"centre": centres}, covariance=triangle(covariances))
        answers = [Expanded(*(told[name][:, k, :len(each.covariances)]
                              for name in ("values", "gradient")))
                   for k, each in enumerate(asked)]
        for part, (each, answer) in enumerate(zip(asked, answers, strict=True)):
            for k, covariance in enumerate(each.covariances):
                key = part, covariance.tobytes()
                new = Statements(each.centres[:, k], answer.values[:, k], answer.gradients[:, k],
                                 np.ones(len(told["values"])))
                self.session.refuse(plausible.contradict(self._said.get(key, new), new))
                self._said[key] = new
        return answers

    def moments(self, part: int) -> tuple[Ints, Array, Array]:
        raise NotImplementedError  # of classes and counts no average is looked for

    def ask_average(self, part: int, question: ColumnQuestion, some: Ints,
                    fields: Answer) -> Iterator[tuple[Ints, Answer]]:
        raise NotImplementedError

    def finish(self, solution: Solution, handed: Array, judged: Judged | None,
               tol: float) -> tuple[Solution, Scores | None]:
        return ask_certificate(self.session, solution, handed, judged, tol, self.sizes,
                               self.units.task)


def ask_certificate(session: Session, solution: Solution, handed: Array, judged: Judged | None,
                    tol: float, sizes: list[Ints], task: Task,
                    known: Problem | None = None) -> tuple[Solution, Scores | None]:
    """`FitSource.finish` by users elsewhere; `known` is the problem of their second moments, where
    these decide everything.
    """
    models, shared = {"point": handed}, dict[str, Array]()
    if judged is not None:
        models |= {"fitted": judged.fitted, "together": judged.together}
        if judged.average is not None:
            shared["settings"] = packed(HandedAverage.send(judged.average).arrays())
    solution, told = _certify(session, solution, tol, sizes[0], models, known, shared)
    if judged is None:
        return solution, None
    rows = int(sizes[0].sum() - sizes[1].sum())
    return solution, scores_of(judged, task, told["scores"], told["worse"] > 0, rows)


def _padded(asked: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """(n, parts, k, dim) centres and (parts, k, dim, dim) covariances, as many in every part."""
    most = max(len(covariances) for _, covariances in asked)
    some = [np.minimum(np.arange(most), len(covariances) - 1) for _, covariances in asked]
    return (np.stack([centres[:, k] for (centres, _), k in zip(asked, some, strict=True)], axis=1),
            np.stack([each[k] for (_, each), k in zip(asked, some, strict=True)]))


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
    if k > 1:
        _say_unscored(session, parts[1].counts)
    everything = parts[0] if k == 1 else parts[0].add(parts[1])
    users = everything.users(agreement.names, agreement.features)
    if k == 1:
        return users, None
    train, test = (part.users(agreement.names, agreement.features) for part in parts)
    return users, Split(train, test.take([]), test)


def _certify(session: Session, solution: Solution, tol: float, sizes: Ints,
             models: dict[str, Array], known: Problem | None = None,
             average: dict[str, Array] | None = None) -> tuple[Solution, dict[str, Array]]:
    """The solution with a certificate from the users' own rows, and all that they answered.

    Where rows count alike, the loss of user i is w_i f_i, whose conjugate at u is w_i times that
    of f_i at u / w_i.

    Parameters
    ----------
    session : asks.
    solution : with duals.
    tol : the certified relative gap to reach.
    sizes : (n_users,) rows.
    models : that users get, and judge.
    known : the problem by second moments, where these decide everything: answers must agree.
    average : what is sent of an average to judge.
    """
    began, problem = time.perf_counter(), solution.problem
    graph, n = problem.graph, problem.n_users
    loss, counted = _unwrapped(problem.loss, sizes)
    duals = (np.zeros((graph.n_edges, problem.dim)) if solution.duals is None
             else project(solution.duals, problem.radii))
    slopes, about = -graph.divergence(duals), reference(graph, solution.models)
    shared, ragged = dict(average or {}), dict[str, Ragged]()
    if loss.covariance is not None:
        shared["covariance"] = triangle(np.asarray(loss.covariance)[None])
        if loss.scales is not None:
            ragged["noise"] = Ragged.of(loss.scales * sizes, np.ones(n, dtype=np.int64))
    asked = {"model": solution.models, "slope": slopes / counted[:, None], "anchor": about}
    replies = session.ask("certify", problem.dim, arrays=asked | models, shared=shared,
                          ragged=ragged)
    answers = Answers(*(counted * replies.arrays[name]
                        for name in ("value", "conjugate", "residual", "size", "rounding")))
    judgement = judged(problem, solution.models, slopes, about, answers)
    if known is None and problem.loss.stated is problem.loss:  # whose data are here
        known = problem
    wrong = _wrong_answers(known, solution.models, slopes, about, answers)
    session.refuse(wrong, _to_blame(judgement, tol))
    certificate = judgement.certificate.with_duals(duals)
    done = replace(solution, certificate=certificate, status=Status.of(certificate, tol),
                   duals=duals, seconds=solution.seconds + time.perf_counter() - began)
    return done, dict(replies.arrays)


def _unwrapped(loss: Loss, sizes: Ints) -> tuple[Loss, Array]:
    """The loss of a user, or of its centre, and what it counts in the problem."""
    loss, own = loss.stated, loss.own_loss
    if loss.rows_per_user is None:
        return loss, np.ones(len(sizes))
    counted = np.asarray(sizes / loss.rows_per_user)
    if isinstance(loss, Personal):
        price = np.asarray(loss.scale) / np.maximum(counted, 1e-300)
        return Personal(own, covariance=loss.covariance, scale=price), counted
    return own, counted


def _wrong_answers(known: Problem | None, models: Array, slopes: Array, about: Array,
                   answers: Answers) -> Flags:
    """Whose value and conjugate contradict each other or, where second moments decide everything,
    these.
    """
    products = np.einsum("nd,nd->n", slopes, models - about)
    wrong = plausible.beyond_conjugate(answers.values, answers.conjugates, products,
                                       answers.rounding)
    if known is None:
        return wrong
    expected = answers_of(known.loss, known.samples, models, slopes, about)
    slack = _CONTRADICTS * (expected.sizes + np.abs(expected.values))
    return wrong | (np.abs(answers.values - expected.values) > slack)


def _to_blame(judgement: Judgement, tol: float) -> list[str]:
    """The user because of whom alone the certificate fails, by far."""
    reasons = [""] * len(judgement.own)
    if judgement.without_worst <= tol and np.inf > judgement.share > _BY_FAR * tol:
        reasons[judgement.worst] = ("the certificate fails because of its replies alone: its part "
                                    "of the gap is "
                                    f"{judgement.own[judgement.worst]:.1e}")
    return reasons
