"""What is known about the convex problem: its path over lambda, proofs about groups, and choices of
lambda.
"""
