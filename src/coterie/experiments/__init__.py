"""Experiments: what the paper shows, and what methods do on real federations."""
