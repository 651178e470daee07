"""What is minimised, its solutions and their certificates: problem (C), graphs and weights,
newcomers.
"""

from coterie.problem.graph import Graph
from coterie.problem.problem import Problem, lam_from_eq3

__all__ = ["Graph", "Problem", "lam_from_eq3"]
