"""What the project is measured by: methods to compare with, experiments, attacks. Nothing else
imports it.
"""
