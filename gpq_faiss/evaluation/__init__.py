"""Measuring rankings: metrics (arrays in, numbers out), rankings of whole databases, and tables of
results."""
