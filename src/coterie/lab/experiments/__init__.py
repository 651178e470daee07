"""Experiments: the figures and claims of the paper, and methods compared on real federations."""
