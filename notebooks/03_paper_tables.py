# %% [markdown]
# # The paper's tables: methods compared on one split
#
# The GPQ paper compares some twenty methods. **At the end you have** a small table 2 of your own with its plots, a run of it searched
# again from its file, the heat map of the two loss weights (figure 4) and codebooks drawn in the plane (figure 1), all on
# scikit-learn's digits and in about a minute on one CPU core. The full tables take the same two steps:
#
#     gpq experiment run table2 features:clip.npy --labels labels.npy --jobs 2 --out table2
#     gpq experiment report table2 --format markdown --plots table2/plots
#
# All methods have the same items, the same 20 labels per digit, and the same queries; those that train a network have
# the same number of steps. The average precision takes its expected value over the order of equal scores.

# %%
import json
import subprocess
from pathlib import Path

import h5py
import numpy as np
from IPython.display import Image, Markdown, display

import gpq_faiss as gpq

run = Path("run-03")
run.mkdir(exist_ok=True)
digits = gpq.open_data("digits")

# %% [markdown]
# ## The methods
#
# `gpq experiment methods` lists them:

# %%
command = ["gpq", "experiment", "methods", "--format", "json"]
methods = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
rows = [{name: row[name] for name in ("method", "learns", "code", "from")} for row in methods]
display(Markdown(gpq.render(rows, "markdown")))

# %% [markdown]
# ## Table 2, in small
#
# The grid `table2` is every method at four lengths and three seeds. A grid of your own is a TOML file. This one has a few methods, two
# lengths, one seed, small networks and 150 steps. (`gpq.run_experiment` is `gpq experiment run` from Python.)

# %%
SMALL = """
steps = 150
batch_labelled = 100
batch_unlabelled = 100
"""
GRID = f"""
title = "Table 2, in small"
kind = "table"
methods = ["posterior", "gpq", "opq", "pq", "sdh", "itq", "float"]
bits = [12, 24]
seeds = [0]
protocol = "1"
labelled = "20-per-class"
preset = "recommended"

[config.posterior]
networks = 2

[config.network]
hidden = [128]

[config.training]{SMALL}"""
grid = run / "small.toml"
grid.write_text(GRID)
summary = gpq.run_experiment(grid, digits, run / "table2")
print(f"{summary.completed} runs made, {len(summary.failed)} failed")

# %% [markdown]
# A second call finds that all runs are there:

# %%
summary = gpq.run_experiment(grid, digits, run / "table2")
print(f"{summary.completed} runs made, {summary.existing} already done")

# %%
display(Markdown(gpq.report_experiment(run / "table2", "markdown", table="map")))

# %% [markdown]
# `posterior` are class-posterior codes, the default of `gpq train`; `gpq` is the paper's method with the network and
# training of the others. They train networks, the others learn from the pixels as they are; `opq`,
# `pq`, `itq` and `float` see no label, and `float` keeps no code: it is the exact search on the pixels.
# NN10@100 is the share of a query's ten nearest images among its first 100 results.
#
# Precision near the top of the ranking is another matter than over the whole of it:

# %%
display(Markdown(gpq.report_experiment(run / "table2", "markdown", table="depth")))

# %%
pictures = gpq.draw_experiment(run / "table2", run / "plots", overwrite=True)
print(", ".join(sorted(path.name for path in pictures.values())))
display(Image(run / "plots" / "map.png", width=480))

# %% [markdown]
# ## A run can be searched again
#
# Each run is one HDF5 file. It has the codes and, for every query, the score of each codeword, so any figure of it can be computed
# again. Equal codes have equal scores and no order among them, so the ids are sorted here.

# %%
with h5py.File(run / "table2" / "gpq_24bits_seed0.h5") as file:
    codes, tables = file["codes"][()], file["tables"][0]
    numbers = np.stack([codes & 15, codes >> 4], axis=2).reshape(len(codes), -1)  # two to a byte
    scores = tables[np.arange(len(tables)), numbers].sum(axis=1)
    found = np.argsort(-scores, kind="stable")[:5]
    print(f"{len(codes):,} items of {codes.shape[1]} bytes; query {file['query_ids'][0]}")
    print("by the tables:", sorted(file["database_ids"][()][found].tolist()))
    print("in the file:  ", sorted(file["top_ids"][0, :5].tolist()))

# %% [markdown]
# ## Figure 4, in small: the weights of the two losses
#
# `[product]` makes a run of each combination of settings.

# %%
WEIGHTS = """
title = "Weights of the classification and the entropy loss"
kind = "sensitivity"
methods = ["gpq"]
bits = [12]
seeds = [0]
labelled = "20-per-class"
preset = "paper"

[config.training]
steps = 60
batch_labelled = 100
batch_unlabelled = 100
learning_rate = 0.002

[product]
"loss.lambda1" = [0.0, 0.1, 0.5]
"loss.lambda2" = [0.0, 0.1, 0.5]
"""
weights = run / "weights.toml"
weights.write_text(WEIGHTS)
gpq.run_experiment(weights, digits, run / "weights")
gpq.draw_experiment(run / "weights", run / "plots", overwrite=True)
display(Image(run / "plots" / "sensitivity-gpq-12.png", width=420))

# %% [markdown]
# ## Figure 1: codewords in two dimensions
#
# With sub-vectors of two dimensions a codebook can be drawn. Codewords and items lie on the unit circle;
# items are drawn a little off it, so that they do not cover each other.

# %%
FLAT = """
title = "Codebooks in two dimensions"
kind = "voronoi"
methods = ["gpq"]
bits = [8]
seeds = [0]
labelled = "20-per-class"
preset = "paper"
vectors = 150

[config.quantizer]
subdim = 2

[config.network]
hidden = [512]

[config.training]
steps = 150
batch_labelled = 100
batch_unlabelled = 100
learning_rate = 0.002
"""
flat = run / "flat.toml"
flat.write_text(FLAT)
gpq.run_experiment(flat, digits, run / "voronoi")
gpq.draw_experiment(run / "voronoi", run / "plots", overwrite=True)
display(Image(run / "plots" / "voronoi.png", width=560))

# %% [markdown]
# These figures are not those of the paper, which are of CIFAR-10 and NUS-WIDE images, of convolutional networks and of longer trainings.
# `docs/experiments.md` says how to run the whole grids.
