"""What solutions tell: the path over lam, recovery bounds, the choice of a point, groups."""
