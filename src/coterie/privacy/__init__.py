"""What a release costs, how it is made, and what can be learned from it."""
