"""One model per user, pulled towards the predictions of its cluster: clustered distillation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from coterie.base.errors import Incompatible
from coterie.base.types import Array, Ints
from coterie.data.scaling import Standardizer
from coterie.data.users import Users
from coterie.lab.baselines.base import Baseline, Fitted, Outcome, check
from coterie.lab.baselines.descent import settled
from coterie.lab.baselines.ifca import cluster_means
from coterie.lab.baselines.kmeans import k_means
from coterie.lab.baselines.run import BaselineRun, near
from coterie.losses import AffineLoss, Loss, Samples
from coterie.losses.blocks import in_blocks


@dataclass(frozen=True, kw_only=True)
class Comet(Baseline):
    """minimise_x f_i(x) + weight/2 mean_j ||t(a_ij, x) - mean over i's cluster of t(a_ij, x_l)||^2,
    alternating with k-means on the predictions t(a, x_i) of all users at common probe inputs a.

    Cho, Wang, Chirvolu and Joshi, 2021, "Personalized federated learning for heterogeneous clients
    with clustered knowledge transfer" (COMET). In the paper, t are logits of networks on a public
    data set, which is used for the clusters and for the distillation, and users take gradient
    steps. Here t is the margin <w, a> + b (one per class for Multinomial), the probe inputs are
    drawn from a normal distribution with the pooled means and variances of the features, the
    distillation uses the user's own inputs, and the problem of each user is solved exactly. Since t
    is linear in x, the mean prediction of a cluster is that of its mean model, and the second term
    is weight/2 (x - mean)' G_i (x - mean) with G_i the Gram matrix of the inputs. A newcomer is
    pulled to the mean model with the least loss.

    Traffic per user and round: n_probes numbers up (times outputs) and dim down; once 2 n_features
    in each direction.

    Parameters
    ----------
    weight
        Strength of the distillation; 0: local models.
    n_clusters
        Number of clusters.
    n_probes
        Number of probe inputs.
    rounds
        Largest number of rounds; the method stops earlier if nothing changes.
    """

    name: ClassVar[str] = "comet"
    weight: float = 1.0
    n_clusters: int = 2
    n_probes: int = 100
    rounds: int = 50

    def __post_init__(self) -> None:
        check(weight=(self.weight, 0.0, np.inf), n_clusters=(self.n_clusters, 1, np.inf),
              n_probes=(self.n_probes, 1, np.inf), rounds=(self.rounds, 1, np.inf))

    @classmethod
    def grid(cls, users: Users, loss: Loss) -> tuple[Self, ...]:
        counts = [k for k in (2, 4) if k <= users.n_users] or [1]
        return tuple(cls(weight=w, n_clusters=k) for k in counts for w in (0.01, 0.1, 1.0, 10.0,
            100.0))

    def _fit(self, run: BaselineRun) -> Outcome:
        grams = _grams(run.loss, run.samples)
        users, models = run.samples.users.data, run.own()
        scaler = Standardizer.from_moments(users.moments())
        probe = scaler.mean + scaler.scale \
            * run.rng.standard_normal((self.n_probes, users.n_features))
        run.exchange(down=2 * users.n_features, up=2 * users.n_features)
        labels, seed = np.full(run.n_users, -1), int(run.rng.integers(2**31))
        means = np.repeat(models.mean(axis=0, keepdims=True), self.n_clusters, axis=0)
        for _ in range(self.rounds):
            margins = run.loss.decision(np.tile(probe, (run.n_users, 1)),
                                        np.repeat(models, self.n_probes, axis=0))
            margins = margins.reshape(run.n_users, -1)
            # The same starts in every round, so that the numbers of the clusters do not change
            # after convergence.
            new_labels = k_means(margins, self.n_clusters, np.random.default_rng(seed))
            changed, labels = not np.array_equal(new_labels, labels), new_labels
            means = cluster_means(models, labels, means)
            run.exchange(down=run.dim, up=margins.shape[1])
            if self.weight == 0:
                break
            before, models = models, near(run.loss, run.samples, self.weight * grams, means[labels],
                                          models)
            if not changed and settled(before, models):
                break
        return Outcome(models, means, labels)

    def _join(self, fitted: Fitted, samples: Samples) -> tuple[Array, Ints]:
        centres, clusters = super()._join(fitted, samples)
        return near(fitted.loss, samples, self.weight * _grams(fitted.loss, samples), centres), \
            clusters


def _grams(loss: Loss, samples: Samples) -> Array:
    """(n_users, dim, dim) mean_j a_ij a_ij', repeated for each output."""
    if not isinstance(loss, AffineLoss):
        raise Incompatible(f"Models of {type(loss).__name__} do not predict targets. Use a loss "
                           "with targets.")
    grams = np.empty((samples.n_users, samples.dim, samples.dim))
    for block in in_blocks(loss, samples).blocks:
        root = np.sqrt(block.weights)[..., None] * block.features
        gram = root.swapaxes(1, 2) @ root
        # A model with several outputs is a (features, outputs) matrix in row-major order.
        grams[block.index] = np.kron(gram, np.eye(samples.dim // gram.shape[1]))
    return grams
