# %% [markdown]
# # Large-scale search: shards, a memory budget, lists on disk
#
# Codes of 6 bytes make a billion items fit a laptop's disk, not always its memory. This notebook builds an index from shards
# within a budget, opens it in place, searches it exactly and by lists, merges shards and filters by id. Nothing in it
# depends on the size: **raise `ITEMS`** and the same cells do the same with a hundred million (about 2 GB of disk and
# some minutes) or more. `docs/large.md` has the commands, `benchmarks/results/large.md` the times at a billion.

# %%
from pathlib import Path

import numpy as np
from IPython.display import Markdown, display
from sklearn.datasets import load_digits

from gpq_faiss.codes.encode import encode
from gpq_faiss.config import merge, preset
from gpq_faiss.data.open import open_data
from gpq_faiss.encoder import Encoder
from gpq_faiss.evaluation.tables import render
from gpq_faiss.faissio.model import read_model, read_prototypes
from gpq_faiss.indexes.file import open_file
from gpq_faiss.indexes.filters import Allow, Deny
from gpq_faiss.indexes.lists import IvfSettings
from gpq_faiss.indexes.opening import open_in_memory
from gpq_faiss.pipeline import train
from gpq_faiss.stages.index import index
from gpq_faiss.store import Header, RowWriter

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
data = open_data(f"features:{run / 'digits.npy'}", labels=str(run / "classes.npy"))
settings = merge(preset("recommended"), {"training": {"steps": 150}})
model = train(data, run / "model", config=settings, protocol="none", overwrite=True)
header_of_model = read_model(model)
Z = header_of_model.codebooks
encoder = Encoder.load(model)
print(f"{len(Z)} codebooks of {Z.shape[1]} codewords: {len(Z) // 2} bytes an item")

# %%
rng = np.random.default_rng(0)
header = Header("codes", len(Z) // 2, header_of_model.model_fingerprint, Z, "simulated-digits")
same_class = [np.flatnonzero(classes == c) for c in range(10)]
shards = []
item_classes = np.empty(ITEMS, np.int64)
for number, rows in enumerate(np.array_split(np.arange(ITEMS), SHARDS)):
    path = run / f"shard-{number}.h5"
    with RowWriter(path, header, overwrite=True) as writer:
        for part in np.array_split(rows, max(1, len(rows) // 50_000)):
            of = rng.integers(0, 10, len(part))
            pair = np.stack([rng.choice(same_class[c], 2) for c in of])
            share = rng.random((len(part), 1))
            mixed = share * pixels[pair[:, 0]] + (1 - share) * pixels[pair[:, 1]]
            vectors, _ = encoder.embed((mixed / 16).astype(np.float32))
            writer.append(encode(vectors, Z), part, None)
            item_classes[part] = of
        writer.finish()
    shards.append(path)
print(f"{ITEMS:,} items in {len(shards)} shards")

# %% [markdown]
# ## Build within a budget
#
# With `memory`, rows stream from the shards through files beside the output. A build that is killed goes on with the
# first shard that was not finished. The result is a plain Faiss file; `fastscan` is the form that is searched in place
# fastest. The same by command: `gpq index model shard-*.h5 --kind fastscan --memory 64MB --out rows.faiss`.

# %%
rows_file = index(model, shards, run / "rows.faiss", kind="fastscan", memory=MEMORY, overwrite=True)
print(f"{rows_file.stat().st_size / ITEMS:.2f} bytes an item")

# %% [markdown]
# ## Open in place, search exactly
#
# `open_file` reads the header alone, whatever the size of the file. A search reads the codes block by block within the
# budget and proves its answer: it equals the one in memory, ties in the order of ids. (With a budget above the size of
# the codes it keeps them, and the second search is as fast as one in memory.)

# %%
queries, _ = encoder.embed((pixels[::18] / 16).astype(np.float32), queries=True)
query_classes = classes[::18]
on_disk = open_file(rows_file, MEMORY)
D, found = on_disk.search(queries, 10)
in_memory = open_in_memory(rows_file, kind="exact")
same = np.array_equal(found, in_memory.search(queries, 10)[1])
print(f"{on_disk.ntotal:,} items; the answer on disk is that in memory: {same}")
print(f"precision at 10: {(item_classes[found] == query_classes[:, None]).mean():.2f}")

# %% [markdown]
# ## Lists
#
# Lists divide the items by a coarse quantiser, and a query looks at the nearest few (`nprobe`). Scores stay exact, and
# so are the results among the lists looked at; with all of them the answer is the exact one. Two ways to make them:
# k-means (for very many items assigned by tables, which cost the same for any number of lists), or the class
# prototypes of the model, one list a class.

# %%
lists_file = index(
    model,
    rows_file,  # an index can be the source, too: it is given another form
    run / "lists.faiss",
    kind="ivf",
    ivf=IvfSettings(lists=64, assignment="tables"),
    memory=MEMORY,
    overwrite=True,
)
by_class_file = index(
    model,
    shards,
    run / "by-class.faiss",
    kind="ivf",
    ivf=IvfSettings(centroids=read_prototypes(model), nprobe=1),
    memory=MEMORY,
    overwrite=True,
)
lists, by_class = open_file(lists_file, MEMORY), open_file(by_class_file, MEMORY)


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
display(Markdown(render(table, "markdown")))

# %% [markdown]
# `tune` chooses `nprobe` for the recall that is asked for, by queries like yours (on the command line:
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
few = on_disk.search(queries, 10, where=Allow(np.arange(1000)))[1]
others = lists.search(queries, 10, where=Deny(found[:, 0]), nprobe=64)[1]
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
    index(model, shard, run / f"part-{number}.faiss", overwrite=True) for number, shard in enumerate(shards)
]
merged = index(model, parts, run / "merged.faiss", kind="exact", memory=MEMORY, overwrite=True)
again = open_file(merged, MEMORY)
print(f"{len(parts)} indexes in one of {again.ntotal:,} items")
print("the same answer:", np.array_equal(again.search(queries, 10)[1], found))
