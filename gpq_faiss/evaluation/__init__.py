"""Evaluation: metrics, rankings of whole databases, and tables of results."""
