"""Experiments: a grid of methods, code lengths and seeds ─► one HDF5 file per run ─► tables and pictures.

Everything in a report is derived from the files of the runs; no figure is stored anywhere else.
"""
