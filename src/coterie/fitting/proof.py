"""A certificate for a fit or a run, computed without trusting what it says about itself."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

from coterie.base.labels import labels_of
from coterie.base.types import Array
from coterie.problem.certificates import certify
from coterie.problem.problem import Problem
from coterie.problem.solution import Certificate
from coterie.solvers import solve


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
