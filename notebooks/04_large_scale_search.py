# %% [markdown]
# # Large-scale search: codes of several files, mapped into memory
#
# Codes of 6 bytes make a billion items fit a laptop's disk, not always its memory. **At the end you have** an index that was merged from
# several files of codes, is opened at once whatever its size, and is searched exactly, with filters. It takes less than a minute on one
# CPU core. Nothing depends on the size: **raise `ITEMS` and `PARTS`**, and the same cells do the same with a hundred million items or
# more. `docs/indexes.md` has the commands, `benchmarks/results/large.md` the times at a billion.

# %%
import time
from pathlib import Path

import faiss
import numpy as np
from IPython.display import Markdown, display
from sklearn.datasets import load_digits

import gpq_faiss as gpq

ITEMS = 60_000  # the parameter
PARTS = 4

run = Path("run-04")
run.mkdir(exist_ok=True)

# %% [markdown]
# ## Codes in several files
#
# `gpq encode` writes a `codes.h5` of any size; here there are four of them, as several machines would write them. To have many items
# at hand, we train on scikit-learn's digits and encode *mixtures of two digits of one class*: the items are simulated, the queries are
# real digits.

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
files = []
for number, rows in enumerate(np.array_split(np.arange(ITEMS), PARTS)):
    pair = np.stack([rng.choice(same_class[c], 2) for c in item_classes[rows]])
    share = rng.random((len(rows), 1))
    mixed = (share * pixels[pair[:, 0]] + (1 - share) * pixels[pair[:, 1]]) / 16
    np.save(run / "mixed.npy", mixed.astype(np.float32))
    np.save(run / "ids.npy", rows)
    part = gpq.open_data(f"features:{run / 'mixed.npy'}", ids=str(run / "ids.npy"))
    out = run / f"codes-{number}.h5"
    files.append(gpq.encode(model, part, out, keep_features=False, overwrite=True))
print(f"{ITEMS:,} items in {len(files)} files")

# %% [markdown]
# ## Merge into a mapped index
#
# A file `NAME.lists` holds the arrays that the search uses. Codes that begin with the same codewords form a list; nothing is trained for
# it. If the rows do not fit in memory, they are sorted through a temporary file. The same by command:
# `gpq index model codes-*.h5 --out index.lists`.

# %%
lists_file = gpq.index(model, files, run / "index.lists", overwrite=True)
faiss_file = gpq.index(model, files, run / "index.faiss", overwrite=True)
for path in (lists_file, faiss_file):
    print(f"{path.name}: {path.stat().st_size / ITEMS:.2f} bytes an item")

# %% [markdown]
# ## Open at once, search exactly
#
# `open_index` maps the file, and the operating system reads what a search touches. The score of a list's codewords, plus the best entry
# of every other look-up table, bounds the scores of all its items. A search visits only the lists that can hold one of the best, so its
# result is exact: it equals that of the plain Faiss file in memory, ties in ascending order of id.

# %%
queries, _ = encoder.embed((pixels[::18] / 16).astype(np.float32), queries=True)
query_classes = classes[::18]
start = time.perf_counter()
mapped = gpq.open_index(lists_file)
print(f"{mapped.ntotal:,} items, opened in {1000 * (time.perf_counter() - start):.0f} ms")
D, ids = mapped.search(queries, 10)
in_memory = gpq.open_index(faiss_file)
print("the results equal those in memory:", np.array_equal(ids, in_memory.search(queries, 10)[1]))
print(f"precision at 10: {(item_classes[ids] == query_classes[:, None]).mean():.2f}")

# %% [markdown]
# ## Speed beside plain Faiss
#
# `IndexPQ` scans all codes for each query.

# %%
plain = faiss.read_index(str(faiss_file))
faiss.omp_set_num_threads(1)
rows = []
for name, search in (("faiss.IndexPQ", plain.search), ("exact search by lists", mapped.search)):
    search(queries, 10)
    start = time.perf_counter()
    scores, _ = search(queries, 10)
    microseconds = 1e6 * (time.perf_counter() - start) / len(queries)
    recall = float((scores >= D[:, -1:] - 1e-4).mean())
    rows.append({"search": name, "microseconds a query": microseconds, "recall@10": recall})
display(Markdown(gpq.render(rows, "markdown")))

# %% [markdown]
# ## Filters
#
# A search takes a list of ids to allow or to deny. It costs no second index.

# %%
even = mapped.search(queries, 10, allow=np.arange(0, ITEMS, 2))[1]
others = mapped.search(queries, 10, deny=ids[:, 0])[1]
print("only even ids:", bool((even % 2 == 0).all()))
print("without any query's first result:", not np.isin(others, ids[:, 0]).any())

# %% [markdown]
# ## Removing and merging
#
# An index does not change: `remove_ids` and `merge` return another one, which shares its arrays.

# %%
halves = [
    gpq.open_index(gpq.index(model, files[i::2], run / f"half-{i}.faiss", overwrite=True))
    for i in range(2)
]
merged = halves[0].merge(halves[1])
print(f"{halves[0].ntotal:,} and {halves[1].ntotal:,} items merged to {merged.ntotal:,}")
print("the same results:", np.array_equal(merged.search(queries, 10)[1], ids))
kept = merged.remove_ids(ids[:, 0])
print(f"{kept.ntotal:,} items without the first results")
