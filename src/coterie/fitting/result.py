"""What a fit found and what can be done with it; its certificate, computed without trusting what it
says about itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from html import escape
from os import PathLike
from pathlib import Path as FilePath
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from coterie.base.errors import InvalidInput
from coterie.base.labels import group_means, labels_of
from coterie.base.types import Array, Flags, Indices, Ints
from coterie.convex.path import Path
from coterie.data.encoding import Recipe
from coterie.data.users import Users
from coterie.fitting.average import Average
from coterie.fitting.inference import CentreSummary, Stability, summarise_centres
from coterie.fitting.kinds import Kind, group_centres, kind_of, loss_of_newcomers
from coterie.fitting.predictions import Predictor, PredictsRows, models_by_name
from coterie.fitting.scores import Scores
from coterie.fitting.settings import Settings
from coterie.fitting.units import Units
from coterie.groups.wide import CentredModels
from coterie.problem.account import Account, Accounted, entry
from coterie.problem.certificates import certify
from coterie.problem.newcomers import Joined, join
from coterie.problem.problem import Problem
from coterie.problem.solution import Certificate, Solution, outline
from coterie.solvers import solve


@dataclass(frozen=True, kw_only=True)
class TableSource:
    """The table that a fit was made from.

    Parameters
    ----------
    data : the file; empty for a frame.
    user, target : columns; empty where there is none.
    features, drop : columns used and left out, separated by commas; empty where all others are
        used.
    separator : of a CSV file; empty where it was detected.
    fingerprint : SHA-256 of the file; empty for a frame.
    """

    data: str = ""
    user: str = ""
    target: str = ""
    features: str = ""
    drop: str = ""
    separator: str = ""
    fingerprint: str = ""


#: How a fit is saved and shown: `coterie.output`, which is built on fits, enters its functions
#: here.
WRITERS: dict[str, Callable[..., FilePath]] = {}


@dataclass(frozen=True, kw_only=True)
class RunCertificate(Certificate):
    """A `Certificate`, and whether what the run claims agrees with it.

    Parameters
    ----------
    n_clusters : number of groups by the models themselves.
    tol : the certified relative gap that the run was to reach.
    same_data : whether the table is the run's file, byte for byte; None where there is no file to
        compare.
    same_claims : whether the groups, their number, their kind and lam are those that the run
        claims.
    same_models : whether the models that predict are those of these groups.

    Example
    -------
    >>> import coterie as ct
    >>> problem = ct.Problem(ct.Users.from_arrays([[0.0], [1.0], [9.0]]), ct.SquaredDistance(),
    ...                      lam=1.0)
    >>> RunCertificate.of(problem, ct.solve(problem).models, tol=1e-6).certified
    True
    """

    n_clusters: int
    tol: float
    same_data: bool | None = None
    same_claims: bool = True
    same_models: bool = True

    @property
    def certified(self) -> bool:
        """Whether no other models are better by more than the tolerance, and those that predict
        come from them.
        """
        return self.relative_gap <= self.tol and self.same_models

    @property
    def holds(self) -> bool:
        """Whether the models are certified and the run's claims agree with them."""
        return self.certified and self.same_claims

    @classmethod
    def of(cls, problem: Problem, models: Array, tol: float, *, same_data: bool | None = None,
           same_claims: bool = True, same_models: bool = True) -> Self:
        """Certify models of a problem.

        First with duals built from the models; where these are not good enough, with those of a new
        solution.

        Parameters
        ----------
        problem, models : what is certified; the models are (n_users, dim).
        tol : the certified relative gap to reach.
        same_data, same_claims, same_models : what is known about the run.

        Returns
        -------
        The certificate.
        """
        proof = certify(problem, models)
        if proof.relative_gap > tol:
            better = certify(problem, models, solve(problem, tol=tol / 10).duals)
            proof = min(proof, better, key=lambda c: c.relative_gap)
        return cls(**{f.name: getattr(proof, f.name) for f in fields(proof)}, tol=tol,
                   same_data=same_data,
                   same_claims=same_claims, same_models=same_models,
                   n_clusters=int(labels_of(models).max()) + 1)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Fit(Accounted, PredictsRows):
    """A fit, and what can be done with it. `coterie.load_run` gives a `Run`, which can do the same.

    Parameters
    ----------
    settings : of the fit.
    units : how the numbers given became the numbers solved for.
    solution : of the convex problem of what was chosen, with its certificate.
    path : from separate models to groups of users; where nothing is given, the one on the users'
        summaries that proposed the groups, with weights by Wald distance.
    chosen : the index of the point of the path with the solution's groups, or the most similar
        ones, and its lam.
    together : (dim,) one model for all, for users who are not among those of the fit.
    why : the reason for the chosen lam, a sentence.
    scores : on held-out rows; None where none were held out.
    compared : the loss of each kind of models by which the kind was chosen, a mean over users.
    compared_errors : for each kind, the standard error over users of its difference from the chosen
        kind.
    stability : how stable the groups are with other rows; None without groups.
    recipe : how the table became numbers; None for a fit of `Users`.
    table : the table; None for a fit of `Users`.
    sent : centres and models in the solver's units, where they cannot be computed because the rows
        are with their users.
    seconds : that the run took, from reading the table to drawing the report; 0 if it was not
        measured.
    account : of a federation; None where all data were in this process.
    average : of several kinds of models, which predicts; its `own` is 1 where the chosen kind
        predicts alone. None where none was looked for.

    Example
    -------
    >>> from coterie.datasets import clustered
    >>> from coterie.fitting import Settings, fit
    >>> fitted = fit(clustered("squared").users, Settings(task="regression", n_lams=4, holdout=0.0))
    >>> fitted.certify().certified
    True
    """

    settings: Settings
    units: Units
    solution: Solution
    path: Path
    chosen: int
    together: Array = field(repr=False)
    why: str
    scores: Scores | None
    compared: dict[str, float] = field(default_factory=dict)
    compared_errors: dict[str, float] = field(default_factory=dict)
    stability: Stability | None = None
    recipe: Recipe | None = None
    table: TableSource | None = None
    sent: CentredModels | None = field(default=None, repr=False)
    seconds: float = 0.0
    account: Account | None = field(default=None, repr=False)
    average: Average | None = field(default=None, repr=False)

    history = entry("history", "Of a federation: one line for every round.")
    privacy = entry("privacy", "Of a federation: what was promised to users; None without noise.")
    at_home = entry("at_home", "Of a private fit: the models that users have finished at home.")

    def __repr__(self) -> str:
        found = outline(self.n_clusters, len(self.names), self.lam, self.gap)
        return f"Fit({self.kind}: {found})"

    @property
    def names(self) -> tuple[Any, ...]:
        """The users' names, in the order of `labels` and `coefficients`."""
        return self.solution.problem.users.names

    @property
    def lam(self) -> float:
        """The chosen penalty strength."""
        return self.solution.lam

    @property
    def labels(self) -> Ints:
        """(n_users,) the group of each user."""
        return self.solution.labels

    @property
    def n_clusters(self) -> int:
        """The number of groups."""
        return self.solution.n_clusters

    @property
    def by_summaries(self) -> bool:
        """Whether groups and models were chosen on summaries: then the path proposed the groups,
        and the problem of the solution has weights inside the groups only.
        """
        return self.settings.lam == self.settings.weights == "auto" and self.noun == "user"

    @property
    def noun(self) -> str:
        """What a user is called: "point" where every user is one row without a target, else "user".
        """
        points = (self.settings.task == "clustering"
                  and int(self.solution.problem.users.data.sizes.max()) == 1)
        return "point" if points else "user"

    def _repr_html_(self) -> str:
        """The view in a notebook."""
        texts = [self.why, *([] if self.scores is None else [str(self.scores)])]
        lines = [f"<p><strong>Warning:</strong> {escape(s)}</p>" for s in self.warnings]
        lines += [f"<p>{escape(s)}</p>" for s in texts]
        return self.solution._repr_html_() + "".join(lines) + self.path._repr_html_()

    @property
    def kind(self) -> Kind:
        """What users get: "one model", "groups", "personal", "personal in groups" or "alone"."""
        return kind_of(self.solution.problem.loss, self.labels)

    @cached_property
    def centres(self) -> Array:
        """(n_clusters, dim) the centre of each group, fitted to its rows without the penalty; in
        the solver's units.
        """
        if self.sent is not None:
            return self.sent.centres
        problem = self.solution.problem
        return group_centres(problem.loss, problem.samples, self.labels, self.settings.count,
                             group_means(self.solution.models, self.labels))

    @cached_property
    def models(self) -> Array:
        """(n_users, dim) the models that predict, in the solver's units: centres, or personal
        models around them.
        """
        if self.sent is not None:
            return self.sent.models
        problem = self.solution.problem
        return problem.loss.own_models(problem.samples, self.centres[self.labels])

    def _with_seconds(self, seconds: float) -> Self:
        """The same result with another time; models that are known are not computed again."""
        other = replace(self, seconds=seconds)
        vars(other).update({name: value for name, value in vars(self).items() if name in ("centres",
            "models")})
        return other

    @property
    def warnings(self) -> tuple[str, ...]:
        """What speaks against these models: simpler ones that predict held-out rows better by more
        than chance.
        """
        return () if self.scores is None else self.scores.warnings

    @property
    def statement(self) -> Any:
        """Of a private fit: what is promised, to whom, and what the certificate still proves."""
        return self.privacy.statement()

    @property
    def gap(self) -> float:
        """The certified relative gap."""
        return self.solution.gap

    @property
    def coefficients(self) -> Array:
        """(n_users, n_features + 1, outputs) the models in the units given; see
        `Units.coefficients`.
        """
        return self.units.coefficients(self.models)

    def asked(self) -> dict[str, Any]:
        """What the user asked for, as run.json has it.

        Returns
        -------
        The settings, and of a table its file and columns, by name.
        """
        table = {} if self.table is None else asdict(self.table)
        table.pop("fingerprint", None)
        return {**table, **asdict(self.settings)}

    def models_of(self, names: npt.ArrayLike) -> tuple[Array, Flags]:
        """The model of each user named, as predictions use it.

        Parameters
        ----------
        names : of users, as a list. Like the owners of rows, they are always names, and unknown
            users get the pooled model.

        Returns
        -------
        (n, dim) the models, in the solver's units, and (n,) who is known.

        Raises
        ------
        InvalidInput : `names` is not a list, or holds positions: integers where no name is an
            integer.

        Example
        -------
        >>> import coterie as ct
        >>> from coterie.fitting import Settings, fit
        >>> users = ct.Users.from_arrays([[0.0], [1.0], [2.0]] * 4, [0.1, 1.0, 1.9] * 4,
        ...                              ["a"] * 6 + ["b"] * 6)
        >>> fit(users, Settings(task="regression", n_lams=4, holdout=0.0)).models_of(
        ...     ["b", "stranger"])[1].tolist()
        [True, False]
        """
        given = np.asarray(names, dtype=object)
        if given.ndim == 0:
            raise InvalidInput(f"expected a list of names, got {names!r}",
                               remedy=f"Pass [{names!r}]")
        number = next((name for name in given.tolist() if isinstance(name, (int, np.integer))),
                      None)
        if number is not None and not any(isinstance(name, (int, np.integer))
                                          for name in self.names):
            raise InvalidInput(f"expected names of users, got the integer {number}, and no user is "
                               "named by an integer",
                               remedy=f"Pass fit.names[{number}], or read fit.models[{number}]")
        models, index = models_by_name(given.tolist(), self.names, self.models, self.together)
        return models, index >= 0

    def personalize(self, newcomers: Users) -> Joined:
        """Models for newcomers, with everyone else's models unchanged.

        Newcomers join the group that is likeliest for their rows, with the average pull that the
        group's users have on each other. With weights other than "auto" all users pull, as in
        `Solution.personalize`.

        Parameters
        ----------
        newcomers : their rows, in the units given.

        Returns
        -------
        Their models (in the solver's units) and groups; -1 for those who are unassigned.

        Example
        -------
        >>> import coterie as ct
        >>> from coterie.fitting import Settings, fit
        >>> users = ct.Users.from_arrays([[0.0], [1.0], [2.0]] * 4, [0.1, 1.0, 1.9] * 4,
        ...                              ["a"] * 6 + ["b"] * 6)
        >>> new = ct.Users.from_arrays([[0.0], [2.0]], [0.0, 2.0], ["new"] * 2)
        >>> fit(users, Settings(task="regression", n_lams=4, holdout=0.0)).personalize(
        ...     new).users.names
        ('new',)
        """
        newcomers, problem = self.units.inner(newcomers), self.solution.problem
        loss = loss_of_newcomers(problem.loss.stated, problem.users, newcomers)
        samples = loss.prepare(newcomers)
        shape = (newcomers.n_users, samples.dim)
        likeliest = np.stack([loss.values(samples, np.broadcast_to(c, shape))
                              for c in self.centres]).argmin(axis=0)
        automatic = self.settings.weights == "auto"
        joined = (self._join(newcomers, likeliest) if automatic
                  else self.solution.personalize(newcomers))
        # The price of leaving the centre is the same as for the others.
        if loss.personal:
            return joined._replace(models=loss.own_models(samples, self.centres[likeliest]))
        return joined._replace(models=np.where((joined.clusters >= 0)[:, None],
                                               self.centres[joined.clusters], joined.models))

    def _join(self, newcomers: Users, likeliest: Indices) -> Joined:
        """Newcomers pulled by the users of the likeliest group, as these are by each other."""
        problem, labels, models = self.solution.problem, self.labels, self.solution.models
        graph, shape = problem.graph, (newcomers.n_users, problem.dim)
        inside = labels[graph.edges[:, 0]] == labels[graph.edges[:, 1]]
        pull = 2.0 * float(graph.weights[inside].sum()) / problem.n_users
        joined, clusters, slack = np.empty(shape), np.empty(shape[0], dtype=np.int64), \
            np.empty(shape[0])
        for k in np.unique(likeliest):
            who, members = np.flatnonzero(likeliest == k), np.flatnonzero(labels == k)
            mine = newcomers.take(who)
            loss = loss_of_newcomers(problem.loss.stated, problem.users, mine)
            part = join(problem, models[members], np.zeros_like(members), mine,
                        pull / len(members), loss)
            joined[who], slack[who] = part.models, part.slack
            clusters[who] = np.where(part.clusters < 0, -1, k)
        return Joined(newcomers, joined, clusters, slack)

    def _predictor(self) -> Predictor:
        return Predictor(units=self.units, recipe=self.recipe, names=self.names, models=self.models,
                         labels=self.labels, together=self.together, average=self.average,
                         fingerprint="" if self.table is None else self.table.fingerprint)

    def certify(self) -> RunCertificate:
        """Certify the models again, with new duals.

        Returns
        -------
        The certificate; `holds` says whether the models are optimal to the tolerance of the fit.

        Example
        -------
        >>> from coterie.datasets import clustered
        >>> from coterie.fitting import Settings, fit
        >>> fit(clustered("squared").users, Settings(task="regression", n_lams=4,
        ...                                          holdout=0.0)).certify().holds
        True
        """
        return RunCertificate.of(self.solution.problem, self.solution.models, self.settings.tol)

    def summary(self) -> CentreSummary:
        """Coefficients of the centres with standard errors and intervals, variances of the
        personal part, and noise: given the kind of models and the groups. Prints as a table.

        Returns
        -------
        The summary, with `coefficients` and `groups`.

        Raises
        ------
        InvalidInput : the rows are with their users, or the models have no such coefficients.

        Example
        -------
        >>> from coterie.datasets import clustered
        >>> from coterie.fitting import Settings, fit
        >>> fitted = fit(clustered("squared").users, Settings(task="regression", n_lams=4,
        ...     holdout=0.0))
        >>> len(fitted.summary().groups)
        3
        """
        if self.account is not None:
            raise InvalidInput("the rows of this federation stayed with its users",
                               remedy="Read the models in to_frame()")
        return summarise_centres(self.units, self.solution.problem.users.data, self.labels,
                                 self.kind, average=self.average is not None
                                 and self.average.used)

    def report(self, path: str | PathLike[str], *, title: str = "") -> FilePath:
        """Write the report: one web page that works without a network.

        Parameters
        ----------
        path : the file.
        title : of the page; if omitted, the number of groups.

        Returns
        -------
        The file.

        Example
        -------
        >>> from coterie.datasets import clustered
        >>> from coterie.fitting import Settings, fit
        >>> fitted = fit(clustered("squared").users, Settings(task="regression", n_lams=4,
        ...     holdout=0.0))
        >>> fitted.report("groups.html").name
        'groups.html'
        """
        return WRITERS["report"](self, path, title=title)

    def save(self, folder: str | PathLike[str], *, overwrite: bool = False) -> FilePath:
        """Write the fit as a run folder; see `coterie.save_run`.

        Parameters
        ----------
        folder : created if needed.
        overwrite : whether a run that is there may be replaced.

        Returns
        -------
        The folder.

        Raises
        ------
        InvalidInput : the folder holds something else, or a run that may not be replaced.

        Example
        -------
        >>> import coterie as ct
        >>> from coterie.datasets import clustered
        >>> from coterie.fitting import Settings, fit
        >>> fitted = fit(clustered("squared").users, Settings(task="regression", n_lams=4,
        ...     holdout=0.0))
        >>> ct.load_run(fitted.save("a run")).n_clusters
        3
        """
        return WRITERS["save"](self, folder, overwrite=overwrite)
