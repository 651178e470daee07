"""scikit-learn estimators: one linear model per user, shared by the users of a group, and clusters
of points.

    model = PersonalizedClassifier().fit(X, y, users=owner)     # model.labels_, model.coef_,
                                                                model.gap_
    model.predict(X_new, users=owner_new)
"""

from coterie.estimators.clustering import ConvexClustering
from coterie.estimators.personalized import EVERYONE, PersonalizedClassifier, PersonalizedRegressor
from coterie.estimators.shared import EstimatorConvergenceWarning

__all__ = ["EVERYONE", "ConvexClustering", "EstimatorConvergenceWarning", "PersonalizedClassifier",
           "PersonalizedRegressor"]
