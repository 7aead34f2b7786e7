"""Experiments: a grid of methods, code lengths and seeds ─► one HDF5 file per run ─► a table of
runs.

All tables and figures of a report are derived from that table, which is read from the files.
"""
