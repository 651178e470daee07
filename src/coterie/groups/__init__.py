"""The search for groups: partitions and random effects, judged by how short they make a description
of the data.
"""
