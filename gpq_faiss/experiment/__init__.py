"""Experiments: a grid of methods, code lengths and seeds ─► one HDF5 file per run ─► tables and pictures.

    grid.py       what to run, from TOML (``grids/`` holds the built-in ones)
    specs.py      the single runs of a grid, and what names them
    compute.py    one run: fit, encode, rank, measure
    runfile.py    its file
    workers.py    several at a time, in processes of their own
    run.py        the whole grid: what is missing, in order, and what failed
    results.py    the runs of a folder, and their figures as rows
    published.py  figures of a paper
    report.py     tables from the files; pictures.py: plots

Everything in a report is derived from the files of the runs; no figure is stored anywhere else.
"""
