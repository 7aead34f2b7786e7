# %% [markdown]
# # Your embeddings: replace the PQ of a Faiss pipeline
#
# You have embeddings in Faiss, compressed by product quantisation, and you know the class of *some* items.
# **At the end you have** an index of the same size that ranks by class in the place of the PQ, and two plots that show what it gains and
# what it loses. It takes less than a minute on one CPU core. Three files of yours are needed:
#
# | file | holds |
# |---|---|
# | `items.npy` | float32 [N, width]: the embeddings |
# | `labels.npy` | integers [N]: the class of each item, **−1 where it is not known** |
# | `queries.npy` | float32 [Q, width]: the embeddings of what people search for |
#
# So that the notebook runs anywhere, it makes them from scikit-learn's digits: 24 principal components of the
# pixels stand for the output of an embedding model. To use your own files, put them into `run-02/` and replace
# the second cell of code by `items, queries = np.load(run / "items.npy"), np.load(run / "queries.npy")`. The rest
# runs as it is, up to the comparison, which needs the classes of all items and queries.

# %%
from pathlib import Path

import faiss
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown, display
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA

import gpq_faiss as gpq

run = Path("run-02")
run.mkdir(exist_ok=True)

# %%
rng = np.random.default_rng(0)
pixels, classes = load_digits(return_X_y=True)
order = rng.permutation(len(pixels))
embeddings = PCA(24, random_state=0).fit_transform(pixels)[order].astype(np.float32)
classes = classes[order]
queries, items = np.split(embeddings, [200])
query_classes, item_classes = np.split(classes, [200])

known = np.full(len(items), -1)  # what we pretend to know: 20 items of each class
for c in range(10):
    rows = np.flatnonzero(item_classes == c)[:20]
    known[rows] = c

np.save(run / "items.npy", items)
np.save(run / "labels.npy", known)
np.save(run / "queries.npy", queries)
print(f"{len(items):,} items of width {items.shape[1]}, {np.sum(known >= 0)} of them labelled")
print(f"{len(queries)} queries")

# %% [markdown]
# ## The pipeline as it is
#
# A product quantiser of 48 bits per item, as many people run it:

# %%
before = faiss.index_factory(items.shape[1], "IDMap2,PQ12x4")
before.train(items)
before.add_with_ids(items, np.arange(len(items)))
_, found_before = before.search(queries, 100)

# %% [markdown]
# ## Train on what is known
#
# Items without a label take part as well: labels propagate to nearest neighbours, small classifiers learn from both, and the
# codewords are fitted to the class probabilities of all items. `protocol="none"` sets no queries apart, as ours are in a
# file of their own; by default some of the labelled items would be held back for `evaluate`. The preset `recommended` makes
# codes of 48 bits, as the PQ has; `"quantizer": {"codebooks": 6}` would halve them. Fewer and smaller networks and
# fewer steps are enough here, and save a minute.

# %%
data = gpq.open_data(f"features:{run / 'items.npy'}", labels=str(run / "labels.npy"))
config = gpq.preset("recommended").with_settings(
    {"posterior": {"networks": 2}, "network": {"hidden": [128]}, "training": {"steps": 200}}
)
model = gpq.train(data, run / "model", config=config, protocol="none", overwrite=True)

# %% [markdown]
# ## Put it into the pipeline
#
# `empty.faiss` is a trained `IndexPQ` without items; it takes the place of `index_factory` and `train`. **One thing
# changes**: the vectors that go into it, and the queries, are those of the model's network, not the raw embeddings.
# `encode` writes those of the items to `features.h5`.

# %%
gpq.export_faiss(model, run / "empty.faiss", overwrite=True)
gpq.encode(model, data, run / "codes.h5", overwrite=True)
with gpq.RowReader(run / "features.h5") as reader:
    item_vectors, item_ids = reader.values, reader.ids

after = faiss.IndexIDMap2(faiss.read_index(str(run / "empty.faiss")))
after.add_with_ids(item_vectors, item_ids)

query_vectors, has_direction = gpq.Encoder.load(model).embed(
    np.load(run / "queries.npy"), queries=True
)
scores, found_after = after.search(query_vectors, 100)
print("every query has a direction in every sub-space:", bool(has_direction.all()))

faiss.write_index(after, str(run / "after.faiss"))
for name, index in (("before", before), ("after", after)):
    print(
        f"{name:6} {index.ntotal:,} items, {faiss.downcast_index(index.index).sa_code_size()} bytes each"
    )

# %% [markdown]
# For more items than fit in memory, `gpq.index(model, run / "codes.h5", run / "index.lists")` makes an index of the same codes that is
# mapped into memory.
#
# ## Was it worth it?
#
# The share of results that are of the query's class, with the exact search on the uncompressed embeddings (96 bytes
# per item) for comparison:

# %%
exact = faiss.IndexFlatL2(items.shape[1])
exact.add(items)
_, found_exact = exact.search(queries, 100)


def precision(found: np.ndarray, k: int) -> float:
    """Share of the first k results that have the query's class."""
    return float((item_classes[found[:, :k]] == query_classes[:, None]).mean())


rows = [
    {"index": name, "bytes per item": size, **{f"P@{k}": precision(found, k) for k in (1, 10, 100)}}
    for name, size, found in (
        ("exact search, embeddings", items.shape[1] * 4, found_exact),
        ("before: PQ", 6, found_before),
        ("after: our codes", 6, found_after),
    )
]
display(Markdown(gpq.render(rows, "markdown")))

# %% [markdown]
# The same down the whole list (left), and what is lost (right): how many of a query's ten nearest embeddings are among the first results.

# %%
depths = np.unique(np.geomspace(1, 100, 30).astype(int))
near = found_exact[:, :10]
figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.0), layout="constrained")
for name, found in (
    ("exact search", found_exact),
    ("before: PQ", found_before),
    ("after: our codes", found_after),
):
    left.plot(depths, [precision(found, k) for k in depths], label=name)
    kept = [
        np.mean([np.isin(near[q], found[q, :k]).mean() for q in range(len(near))]) for k in depths
    ]
    right.plot(depths, kept, label=name)
for axes, text in ((left, "share of the query's class"), (right, "share of the ten nearest found")):
    axes.set(xscale="log", xlabel="first results", ylabel=text, ylim=(0, 1.02))
left.legend(loc="lower left")
figure.savefig(run / "gain-and-loss.png", dpi=90)
plt.show()

# %% [markdown]
# PQ keeps *distances*: near the query it is hard to beat, and further down the list it can be no better than the embeddings.
# Our codes keep *classes* first, and neighbours inside a class with the bits that are left. So where you look for the
# one nearest duplicate, keep PQ or the exact search, or let them re-rank what these codes find. How much of each the codes keep is a
# setting: `05_likeness_and_class.ipynb`.
#
# ## What next
#
# - Several classes per item: `labels.npy` as 0/1 [N, C] (a row of zeros is unlabelled).
# - Other files: `features:` opens `.npy`, `.npz`, HDF5 and Parquet; ids come along where the file has them.
# - A service without torch: `gpq.export_encoder(model, "encoder.onnx")`, as in `01_from_images_to_faiss.ipynb`.
# - Figures with queries set apart by a protocol, beside PQ, OPQ and ITQ: `gpq evaluate --help`.
