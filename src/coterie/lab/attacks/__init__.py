"""What can be learned from what crosses the wire: attacks on questions, answers and releases."""

from coterie.lab.attacks.auditing import Audit, Finding, audit
from coterie.lab.attacks.releases import EpsilonBound, epsilon_lower_bound

__all__ = ["Audit", "EpsilonBound", "Finding", "audit", "epsilon_lower_bound"]
