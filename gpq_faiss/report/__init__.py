"""Plots and galleries of results. Matplotlib is imported on first use."""
