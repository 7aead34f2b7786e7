# %% [markdown]
# # Large-scale search: shards, a memory budget, lists on disk
#
# Codes of 6 bytes make a billion items fit a laptop's disk, not always its memory. **At the end you have** an index that was built from
# shards within a memory budget and is searched where it lies on disk: exactly, by lists at a recall that you choose, and with filters; and
# plots of what lists save. It takes less than a minute on one CPU core. Nothing depends on the size: **raise `ITEMS` and `SHARDS`**
# and the same cells do the same with a hundred million items or more. `docs/large.md` has the commands,
# `benchmarks/results/large.md` the times at a billion.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown, display
from sklearn.datasets import load_digits

import gpq_faiss as gpq

ITEMS = 60_000  # the parameter
SHARDS = 4
MEMORY = "64MB"  # of every build and search below; at least 16MB

run = Path("run-04")
run.mkdir(exist_ok=True)

# %% [markdown]
# ## Shards of codes
#
# A shard is a `codes.h5` that `gpq encode` wrote, or Parquet with columns `codes` and `id`. To have many items at hand,
# we train on scikit-learn's digits and encode *mixtures of two digits of one class*; so the items are simulated, the
# queries are real digits.

# %%
pixels, classes = load_digits(return_X_y=True)
np.save(run / "digits.npy", (pixels / 16).astype(np.float32))
np.save(run / "classes.npy", classes)
data = gpq.open_data(f"features:{run / 'digits.npy'}", labels=str(run / "classes.npy"))
settings = gpq.preset("paper").with_settings({"training": {"steps": 150, "learning_rate": 0.001}})
model = gpq.train(data, run / "model", config=settings, protocol="none", overwrite=True)
encoder = gpq.Encoder.load(model)
M, K, _ = encoder.model.codebooks.shape
print(f"{M} codebooks of {K} codewords: {M // 2} bytes per item")

# %%
rng = np.random.default_rng(0)
same_class = [np.flatnonzero(classes == c) for c in range(10)]
item_classes = rng.integers(0, 10, ITEMS)
shards = []
for number, rows in enumerate(np.array_split(np.arange(ITEMS), SHARDS)):
    pair = np.stack([rng.choice(same_class[c], 2) for c in item_classes[rows]])
    share = rng.random((len(rows), 1))
    mixed = (share * pixels[pair[:, 0]] + (1 - share) * pixels[pair[:, 1]]) / 16
    np.save(run / "mixed.npy", mixed.astype(np.float32))
    np.save(run / "ids.npy", rows)
    part = gpq.open_data(f"features:{run / 'mixed.npy'}", ids=str(run / "ids.npy"))
    shards.append(gpq.encode(model, part, run / f"shard-{number}.h5", keep_features=False, overwrite=True))
print(f"{ITEMS:,} items in {len(shards)} shards")

# %% [markdown]
# ## Build within a budget
#
# With `memory`, rows stream from the shards through files beside the output. A build that is killed goes on with the
# first shard that was not finished. The result is a plain Faiss file; `fastscan` is the form that is searched in place
# fastest. The same by command: `gpq index model shard-*.h5 --kind fastscan --memory 64MB --out rows.faiss`.

# %%
rows_file = gpq.index(model, shards, run / "rows.faiss", kind="fastscan", memory=MEMORY, overwrite=True)
print(f"{rows_file.stat().st_size / ITEMS:.2f} bytes per item")

# %% [markdown]
# ## Open in place, search exactly
#
# With `in_place`, `open_index` reads the header alone, whatever the size of the file. (Without it, the budget decides: a small file
# is read into memory.) A search reads the codes block by block within the budget and proves its answer: it equals the one in memory,
# ties in the order of ids. Where the budget holds all codes, they are kept after the first search.

# %%
queries, _ = encoder.embed((pixels[::18] / 16).astype(np.float32), queries=True)
query_classes = classes[::18]
on_disk = gpq.open_index(rows_file, memory=MEMORY, in_place=True)
D, found = on_disk.search(queries, 10)
in_memory = gpq.open_index(rows_file, "exact")
same = np.array_equal(found, in_memory.search(queries, 10)[1])
print(f"{on_disk.ntotal:,} items; the answer on disk is that in memory: {same}")
print(f"precision at 10: {(item_classes[found] == query_classes[:, None]).mean():.2f}")

# %% [markdown]
# ## Lists
#
# Lists divide the items by a coarse quantiser, and a query probes the nearest few (`nprobe`). Scores stay exact, and
# so are the results among the lists probed; with all of them the answer is the exact one. The centroids come from
# k-means (for very many items assigned by tables, which cost the same for any number of lists), or are the class
# prototypes of the model, one list per class.

# %%
lists_file = gpq.index(
    model,
    rows_file,  # an index can be the source, too: it is given another form
    run / "lists.faiss",
    kind="ivf",
    ivf=gpq.IvfSettings(lists=64, assignment="tables"),
    memory=MEMORY,
    overwrite=True,
)
lists = gpq.open_index(lists_file, memory=MEMORY, in_place=True)

# %%
# !cd run-04 && gpq -q index model shard-*.h5 --kind ivf --lists prototypes --nprobe 1 --memory 64MB --out by-class.faiss --overwrite

# %%
by_class = gpq.open_index(run / "by-class.faiss", memory=MEMORY, in_place=True)


def recall(answer: np.ndarray, exact: np.ndarray) -> float:
    """Share of the results that score at least the exact k-th score."""
    return float((answer >= exact[:, -1:] - 1e-6).mean())


table = []
for name, engine, probes in (
    ("k-means, by tables", lists, (1, 2, 4, 8, 64)),
    ("class prototypes", by_class, (1, 2, 10)),
):
    for nprobe in probes:
        answer = engine.search(queries, 10, nprobe=nprobe)[0]
        share = engine.sizes[engine.nearest_lists(queries, nprobe)].sum(axis=1).mean() / ITEMS
        table.append(
            {
                "lists": name,
                "nprobe": nprobe,
                "of": engine.lists,
                "share of the codes": float(share),
                "recall@10": recall(answer, D),
            }
        )
display(Markdown(gpq.render(table, "markdown")))

# %% [markdown]
# How much of the index a query reads for its recall, and how large the lists are (each as a share of all items, largest first):

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.0), layout="constrained")
for name, engine in (("k-means, by tables", lists), ("class prototypes", by_class)):
    points = [row for row in table if row["lists"] == name]
    x, y = [row["share of the codes"] for row in points], [row["recall@10"] for row in points]
    left.plot(x, y, "o-", label=name)
    for row in points:
        left.annotate(
            f"{row['nprobe']}",
            (row["share of the codes"], row["recall@10"]),
            (3, -11),
            textcoords="offset points",
            fontsize=7,
        )
    right.plot(
        np.arange(1, engine.lists + 1), np.sort(engine.sizes)[::-1] / ITEMS, "o-", markersize=3, label=name
    )
left.set(xscale="log", xlabel="share of the codes read (numbers: nprobe)", ylabel="recall@10")
right.set(xscale="log", yscale="log", xlabel="list", ylabel="share of the items")
left.legend()
figure.savefig(run / "lists.png", dpi=90)
plt.show()

# %% [markdown]
# `tune` chooses `nprobe` for the requested recall, by queries like yours (on the command line:
# `gpq search model lists.faiss queries.npy --memory 64MB --recall 0.95`, which prints what each `nprobe` gives).

# %%
points = lists.tune(0.95, k=10, queries=queries)
chosen = next(point for point in points if point["nprobe"] == lists.nprobe)
print(f"for recall 0.95, nprobe {lists.nprobe} of {lists.lists}: recall {chosen['recall']:.3f}")

# %% [markdown]
# ## Filters
#
# Any search takes a filter: ids to allow or deny, a bitmap, or a function of ids. It costs no second index.

# %%
even = on_disk.search(queries, 10, where=lambda ids: ids % 2 == 0)[1]
few = on_disk.search(queries, 10, where=gpq.Allow(np.arange(1000)))[1]
others = lists.search(queries, 10, where=gpq.Deny(found[:, 0]), nprobe=64)[1]
print("even ids alone:", bool((even % 2 == 0).all()))
print("ids below 1,000 alone:", bool((few < 1000).all()))
print("without anyone's first result:", not np.isin(others, found[:, 0]).any())

# %% [markdown]
# ## Merging
#
# Shards that were indexed one by one become one index. Index files of another model are refused, as are ids that
# occur twice.

# %%
parts = [
    gpq.index(model, shard, run / f"part-{number}.faiss", overwrite=True)
    for number, shard in enumerate(shards)
]
merged = gpq.index(model, parts, run / "merged.faiss", kind="exact", memory=MEMORY, overwrite=True)
again = gpq.open_index(merged, memory=MEMORY, in_place=True)
print(f"{len(parts)} indexes in one of {again.ntotal:,} items")
print("the same answer:", np.array_equal(again.search(queries, 10)[1], found))
