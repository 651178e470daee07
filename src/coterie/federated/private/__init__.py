"""Differential privacy: what a release costs, how it is made, and a fit on releases."""
