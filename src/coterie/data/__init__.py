"""Samples of many users: files, columns, checks, and the `Users` they become."""
