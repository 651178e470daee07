"""Runtimes transport queries and replies: in this process, or with Flower."""
