"""What tests share; no test imports from another test."""
