"""Experiments: a grid of methods, code lengths and seeds ─► one HDF5 file per run ─► tables and pictures.

    grid.py       what to run, from TOML (``grids/`` holds the built-in ones)
    runs.py       the single runs of a grid, what names them, and their files
    compute.py    one run: fit, encode, rank, measure
    run.py        the whole grid: what is missing, in order or in processes
    results.py    the folder of runs, and their figures as rows
    report.py     tables from the files; pictures.py: plots

Everything in a report is derived from the files of the runs; no figure is stored anywhere else.
"""
