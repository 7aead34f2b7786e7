# %% [markdown]
# # The paper's tables: methods compared on one split
#
# The GPQ paper compares some twenty methods. This notebook runs a part of that comparison on
# scikit-learn's digits, in seconds, by the
# same two steps as the full one:
#
#     gpq experiment run table2 features:clip.npy --labels labels.npy --jobs 2 --out table2
#     gpq experiment report table2 --format markdown --plots table2/plots
#
# All methods have the same items, the same 20 labels of each digit, and the same queries; those that train a network have
# the same number of steps. The average precision takes its expected value over the order of equal scores.

# %%
from pathlib import Path

from IPython.display import Image, Markdown, display

from gpq_faiss.config import merge, preset
from gpq_faiss.data.open import open_data
from gpq_faiss.evaluation.tables import render
from gpq_faiss.experiment.grid import grid_from, read_grid
from gpq_faiss.experiment.pictures import draw
from gpq_faiss.experiment.results import depth_rows, main_rows, read_experiment
from gpq_faiss.experiment.run import run_experiment
from gpq_faiss.experiment.runfile import filled_index, read_run
from gpq_faiss.methods.registry import METHODS

run = Path("run-03")
run.mkdir(exist_ok=True)
digits = open_data("digits")

# %% [markdown]
# ## The methods

# %%
rows = [
    {"method": name, "learns": entry.learns, "code": entry.code, "from": entry.citation}
    for name, entry in METHODS.items()
]
display(Markdown(render(rows, "markdown")))

# %% [markdown]
# ## Table 2, in small
#
# The grid `table2` is every method at four lengths and three seeds. Here it is cut to a few methods, two
# lengths, one seed, small networks and 200 steps.

# %%
small = {
    "posterior": {"committee": 2, "committee_hidden": 128},
    "training": {"steps": 200, "batch_labelled": 100, "batch_unlabelled": 100},
}
grid = read_grid("table2").with_options(
    methods=("posterior", "gpq", "pqn", "ssdh", "opq", "pq", "sdh", "itq", "float", "classifier"),
    bits=(12, 24),
    seeds=(0,),
    labelled=("20-per-class",),
    variations=read_grid("table2").variations[:1],
    settings={"gpq": small},  # its preset is its own
)
summary = run_experiment(grid, digits, run / "table2", base=merge(preset("recommended"), small))
print(f"{summary.made} runs made, {len(summary.failed)} failed")

# %% [markdown]
# A second call finds that all runs are there:

# %%
summary = run_experiment(grid, digits, run / "table2", base=merge(preset("recommended"), small))
print(f"{summary.made} runs made, {summary.there} there before")

# %%
table2 = read_experiment(run / "table2")
display(Markdown(render(main_rows(table2), "markdown", headers={"method": "bits"})))

# %% [markdown]
# `posterior` are class-posterior codes, the default of `gpq train`; `gpq` is the paper's method with soft targets.
# They, `pqn` and `ssdh` train networks, the others learn from the pixels as they are; `opq`, `pq`,
# `itq` and `float` see no label. `float` and
# `classifier` keep no code: they are what a code is measured against.
#
# Precision near the top of the ranking is another matter than over the whole of it:

# %%
display(Markdown(render(depth_rows(table2, 24, (1, 10, 100)), "markdown", headers={"method": "24 bits"})))

# %%
pictures = draw(run / "table2", run / "plots", overwrite=True)
print(", ".join(sorted(path.name for path in pictures.values())))
display(Image(run / "plots" / "map.png", width=480))

# %% [markdown]
# ## A run can be searched again
#
# Each run is one HDF5 file. It has the codes and a Faiss index without items, so any figure of it can be
# computed again by Faiss
# alone. Equal codes have equal scores and no order among them, so the ids are sorted here.

# %%
path = run / "table2" / "gpq_24bits_seed0.h5"
index = filled_index(path)
of_run = read_run(path, {"search_input", "database_ids", "query_ids", "top_ids"})
scores, found = index.search(of_run.arrays["search_input"][:1], 5)
print(f"{index.ntotal:,} items of {index.sa_code_size()} bytes; query {of_run.arrays['query_ids'][0]}")
print("by Faiss:    ", sorted(of_run.arrays["database_ids"][found[0]].tolist()))
print("in the file: ", sorted(of_run.arrays["top_ids"][0, :5].tolist()))

# %% [markdown]
# ## Figure 4, in small: the weights of the two losses
#
# A grid of your own is a TOML file, or the same as a dict. `[product]` makes a run of each combination.

# %%
weights = grid_from(
    {
        "title": "Weights of the classification and the entropy loss",
        "kind": "sensitivity",
        "bits": [12],
        "labelled": ["20-per-class"],
        "preset": "paper",
        "config": {
            "training": {"steps": 100, "batch_labelled": 100, "batch_unlabelled": 100, "learning_rate": 0.001}
        },
        "product": {"loss.lambda1": [0.0, 0.1, 0.5], "loss.lambda2": [0.0, 0.1, 0.5]},
    },
    "weights",
)
run_experiment(weights, digits, run / "weights")
draw(run / "weights", run / "plots", overwrite=True)
display(Image(run / "plots" / "sensitivity-12.png", width=420))

# %% [markdown]
# ## Figure 1: codewords in two dimensions
#
# With sub-vectors of two dimensions a codebook can be drawn. Codewords and items lie on the unit circle;
# items are drawn a little off it, so
# that they do not cover each other.

# %%
flat = read_grid("voronoi").with_options(labelled=("20-per-class",), bits=(8,), vectors=150)
run_experiment(flat, digits, run / "voronoi", base=merge(preset("paper"), {"training": small["training"]}))
draw(run / "voronoi", run / "plots", overwrite=True)
display(Image(run / "plots" / "voronoi.png", width=560))

# %% [markdown]
# What these figures are not: those of the paper. Its tables are of CIFAR-10 and NUS-WIDE images, of
# convolutional networks and of
# longer trainings. `docs/experiments.md` says how to run the whole grids, and how to put published
# figures beside them.
