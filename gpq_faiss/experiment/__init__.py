"""Experiments: a grid of methods, code lengths and seeds ─► one HDF5 a run ─► tables and pictures.

    grid.py       what is to be run, from TOML (``grids/`` holds the built-in ones)
    cells.py      the single runs of a grid, and what names them
    compute.py    one run: fit, encode, rank, measure
    runfile.py    its file
    workers.py    several at a time, in processes of their own
    run.py        the whole grid: what is missing, in order, and what failed
    published.py  the paper's own figures
    report.py     tables from the files; pictures.py: plots

Everything of a report is derived from the files of the runs; no figure lives anywhere else.
"""
