# %% [markdown]
# # Neighbours and class: what a code should keep
#
# A code that ranks by class alone gives every query of a class the same results: mAP is high, and the images that look most like the
# query are lost among the others of its class. A code of the features alone keeps those, and mixes the classes. **At the end you have**
# the frontier between the two on scikit-learn's digits, as a table and a plot, and galleries of its two ends, from which you can choose
# the setting `posterior.feature_weight` for your own data. It takes less than a minute on one CPU core.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
from IPython.display import Image, Markdown, display

import gpq_faiss as gpq

run = Path("run-05")
run.mkdir(exist_ok=True)
digits = gpq.open_data("digits")

# %% [markdown]
# ## One model per weight
#
# All have codes of 48 bits, the same 20 labels per class, the same split and the same small networks. `feature_weight` is the weight of the
# features' similarity in a score; that of the class is the rest. At 0 all codebooks hold the class.
#
# - **mAP** measures the class: the mean average precision of whole rankings, in which the images of the query's class are relevant.
# - **NN10@100** measures neighbour recall: the share of a query's ten nearest images, by cosine of the pixels, among its first 100 results.

# %%
WEIGHTS = (0.0, 0.02, 0.1, 0.5)
rows = []
for weight in WEIGHTS:
    config = gpq.preset("recommended").with_settings(
        {
            "network": {"backbone": "mlp", "hidden": [128]},
            "posterior": {"networks": 2, "feature_weight": weight},
            "training": {"steps": 150, "batch_labelled": 50, "batch_unlabelled": 150},
        }
    )
    model = gpq.train(
        digits, run / f"model-{weight}", config=config, labelled="20-per-class", overwrite=True
    )
    compare = ("pq", "float") if weight == WEIGHTS[-1] else ()
    found = gpq.evaluate(model, digits, compare=compare)
    rows += [
        {
            "codes": {
                found.method: f"feature_weight {weight}",
                "float": "exact search, no code",
            }.get(name, name),
            "mAP": row.ranking.map,
            "NN10@100": row.neighbour_recall.nn10_at_100,
        }
        for name, row in found.measured.items()
    ]
display(Markdown(gpq.render(rows, "markdown")))

# %% [markdown]
# ## The frontier

# %%
ours, others = rows[: len(WEIGHTS)], rows[len(WEIGHTS) :]
figure, axes = plt.subplots(figsize=(5.6, 3.6), layout="constrained")
axes.plot(
    [row["NN10@100"] for row in ours],
    [row["mAP"] for row in ours],
    "o-",
    label="class-posterior codes",
)
for row, weight in zip(ours, WEIGHTS, strict=True):
    axes.annotate(
        f"{weight:g}", (row["NN10@100"], row["mAP"]), (5, 5), textcoords="offset points", fontsize=8
    )
for row, marker in zip(others, "s^", strict=True):
    axes.plot(row["NN10@100"], row["mAP"], marker, label=row["codes"])
axes.set(xlabel="NN10@100: neighbour recall", ylabel="mAP: class")
axes.margins(0.1)
axes.legend(loc="lower left")
figure.savefig(run / "frontier.png", dpi=90)
plt.show()

# %% [markdown]
# ## The two ends
#
# These are the results of four queries, which no training saw, in the index of the first model and in that of the last. Both indexes hold
# the queries, too. With the weight 0 all results have the query's class, in nearly the same order for each query of that class:


# %%
def gallery(weight: float) -> Path:
    """Picture of the best results of four queries by the codes of one model."""
    model, name = run / f"model-{weight}", f"{weight}"
    codes = gpq.encode(model, digits, run / f"codes-{name}.h5", keep_features=False, overwrite=True)
    index = gpq.index(model, codes, run / f"index-{name}.faiss", overwrite=True)
    queries = ",".join(str(row) for row in found.queries[12::25])
    result = gpq.search(model, index, digits, rows=queries, k=10)
    return result.draw(digits, digits, run / f"gallery-{name}.png", overwrite=True)


print("feature_weight", WEIGHTS[0])
display(Image(filename=gallery(WEIGHTS[0]), width=720))

# %% [markdown]
# With the weight 0.5 the query itself comes first, then images with its slant and stroke, a few of them of another class:

# %%
print("feature_weight", WEIGHTS[-1])
display(Image(filename=gallery(WEIGHTS[-1]), width=720))

# %% [markdown]
# ## What next
#
# - The default weight, 0.02, costs hardly any mAP. Take more where results should look alike within a class, and 0 where only the
#   class counts.
# - On your own data: `gpq experiment run neighbours features:clip.npy --labels labels.npy --out neighbours` runs several weights beside
#   other methods, and `gpq experiment report neighbours --plots neighbours/plots` draws them.
# - `docs/evaluation.md` defines the measures, `docs/results.md` has the frontier on larger data.
