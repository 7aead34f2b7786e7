# %% [markdown]
# # Large-scale search: shards, a memory budget, lists on disk
#
# Codes of 6 bytes make a billion items fit a laptop's disk, not always its memory. **At the end you have** an index that was built from
# shards within a memory budget and is searched where it lies on disk: exactly, with filters, and with fewer lists than exactness needs; and
# plots of what the lists save. It takes less than a minute on one CPU core. Nothing depends on the size: **raise `ITEMS` and `SHARDS`**
# and the same cells do the same with a hundred million items or more. `docs/indexes.md` has the commands,
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
# first shard that was not finished. The result is a plain Faiss file. Kind `ivf` sorts the codes into lists made of their first codewords:
# nothing is trained for it. The same by command: `gpq index model shard-*.h5 --kind ivf --memory 64MB --out lists.faiss`.

# %%
lists_file = gpq.index(model, shards, run / "lists.faiss", kind="ivf", memory=MEMORY, overwrite=True)
print(f"{lists_file.stat().st_size / ITEMS:.2f} bytes per item")

# %% [markdown]
# ## Open in place, search exactly
#
# With `in_place`, `open_index` reads the header alone, whatever the size of the file. (Without it, the budget decides: a small file
# is read into memory.) The score of a list's codewords, plus the best entry of every other table, bounds the scores of all its items. So a
# search reads only the lists that can hold one of the best, and proves its answer: it equals the one in memory, ties in the order of ids.

# %%
queries, _ = encoder.embed((pixels[::18] / 16).astype(np.float32), queries=True)
query_classes = classes[::18]
on_disk = gpq.open_index(lists_file, memory=MEMORY, in_place=True)
D, found = on_disk.search(queries, 10)
in_memory = gpq.open_index(lists_file)
same = np.array_equal(found, in_memory.search(queries, 10)[1])
print(f"{on_disk.ntotal:,} items; the answer on disk is that in memory: {same}")
print(f"precision at 10: {(item_classes[found] == query_classes[:, None]).mean():.2f}")

# %% [markdown]
# ## What the lists save, and stopping early
#
# With `nprobe` a search visits only so many lists, those of the best bounds. `bound` says what an item outside of them can score at most:
# where the last result is above it, the answer is proven to be the exact one.


# %%
def recall(answer: np.ndarray) -> float:
    """Share of the results that score at least the exact k-th score."""
    return float((answer >= D[:, -1:] - 1e-6).mean())


lists = on_disk.lists
table = []
for nprobe in (1, 2, 4, 8, 16, 32, lists.lists):
    before = lists.scored
    answer = on_disk.search(queries, 10, nprobe=nprobe)[0]
    table.append(
        {
            "nprobe": nprobe,
            "share of the codes": (lists.scored - before) / len(queries) / ITEMS,
            "recall@10": recall(answer),
            "proven": float((answer[:, -1] > on_disk.bound(queries, 10, nprobe)).mean()),
        }
    )
display(Markdown(gpq.render(table, "markdown")))
before = lists.scored
on_disk.search(queries, 10)
exact_share = (lists.scored - before) / len(queries) / ITEMS
print(f"the exact search scores {exact_share:.1%} of the codes")

# %%
figure, axes = plt.subplots(figsize=(4.4, 3.0), layout="constrained")
share = [row["share of the codes"] for row in table]
axes.plot(share, [row["recall@10"] for row in table], "o-", label="recall@10")
axes.plot(share, [row["proven"] for row in table], "o--", label="proven to be exact")
axes.axvline(exact_share, color="0.6", label="exact search")
axes.set(xscale="log", xlabel="share of the codes scored", ylim=(0, 1.05))
axes.legend()
figure.savefig(run / "lists.png", dpi=90)
plt.show()

# %% [markdown]
# ## Filters
#
# Any search takes a filter: ids to allow or deny, or a function of ids. It costs no second index.

# %%
even = on_disk.search(queries, 10, where=lambda ids: ids % 2 == 0)[1]
few = on_disk.search(queries, 10, where=gpq.Allow(np.arange(1000)))[1]
others = on_disk.search(queries, 10, where=gpq.Deny(found[:, 0]))[1]
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
merged = gpq.index(model, parts, run / "merged.faiss", kind="ivf", memory=MEMORY, overwrite=True)
again = gpq.open_index(merged, memory=MEMORY, in_place=True)
print(f"{len(parts)} indexes in one of {again.ntotal:,} items")
print("the same answer:", np.array_equal(again.search(queries, 10)[1], found))
