"""Experiments: a grid of methods ─► one HDF5 file per run ─► a table of runs ─► a report.

All tables and figures of a report are derived from the table, which is read from the files.
"""
