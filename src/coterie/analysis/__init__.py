"""The analysis of solutions: the path over lam, recovery bounds, the choice of lam, groups."""
