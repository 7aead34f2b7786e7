"""Plots, galleries and HTML pages of results. Matplotlib is imported on first use."""
