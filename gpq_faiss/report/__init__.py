"""Plots, galleries and HTML pages of results. Matplotlib is imported when a picture is drawn."""
