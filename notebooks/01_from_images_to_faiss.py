# %% [markdown]
# # From images to a Faiss index
#
# **At the end you have** a Faiss index of 1,797 images in 6 bytes each that **any program with Faiss can search**, a picture of its
# results, a table of what the codes are worth beside PQ, OPQ and ITQ, and an ONNX file that computes vectors of new queries without torch.
# It takes less than a minute on one CPU core:
#
#     images ─► model ─► codes ─► Faiss index ─► figures ─► ranked results
#
# The images are scikit-learn's digits. Only 20 images per class keep their label; most others take part in the training without one.
#
# You need `pip install '.[train,onnx]'` and Jupyter. All files are written to `run-01/`.

# %%
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import faiss
import numpy as np
from IPython.display import Image, Markdown, display

import gpq_faiss as gpq

run = Path("run-01")
run.mkdir(exist_ok=True)

# %% [markdown]
# ## The data
#
# `digits` are 1,797 handwritten digits of 8 × 8 pixels. Your own images are opened in the same way:
# `gpq.open_data("folder:photos")` for one folder per class, `csv:` and `parquet:` for tables of paths and labels.
# Nothing below would change.

# %%
digits = gpq.open_data("digits")
labels = digits.require_labels()
print(f"{len(digits):,} images, {labels.n_classes} classes")
display(
    Markdown(
        gpq.render(
            [dict(zip(labels.class_names, labels.counts().tolist(), strict=True))], "markdown"
        )
    )
)

# %% [markdown]
# ## Train
#
# A preset is the starting point, and `with_settings` changes single settings. These suit images this small:
#
# - `mlp`, a plain network on the pixels. Photographs are better served by a network that was trained on ImageNet: the settings
#   `{"backbone": "timm/tf_efficientnet_lite0", "weights": "imagenet"}` fine-tune one, see
#   [Your own photos](../docs/photos.md);
# - fewer and smaller networks and fewer steps than the preset has, because this is a demonstration.
#
# `labelled="20-per-class"` hides all other labels before anything of the training is built. The queries of the
# evaluation (protocol 1) are set apart too: training does not see them at all.

# %%
config = gpq.preset("recommended").with_settings(
    {
        "quantizer": {"codebooks": 12, "codewords": 16},  # 12 × 4 bits = 48 bits
        "network": {"backbone": "mlp", "hidden": [128]},
        "posterior": {"networks": 2},
        "training": {"steps": 200, "seed": 0},
    }
)
model = gpq.train(
    digits,
    run / "model",
    config=config,
    labelled="20-per-class",
    options=gpq.RunOptions(validate_every=40),
    overwrite=True,
)
print(sorted(file.name for file in model.iterdir()))

# %% [markdown]
# On the command line: `gpq train digits --labelled 20-per-class --bits 48 --preset run.toml --out model`, with the
# same sections in `run.toml`.
#
# `metrics.jsonl` has the losses, one line every `validate_every` steps. Class networks are trained on images with and
# without a label, and on the labels that propagate to the nearest neighbours of labelled images. In the end the codewords
# are fitted so that their sums approximate the class probabilities of the images, and what these leave of the features.
# These are class-posterior codes, the default. (`gpq.preset("paper")` is GPQ, the method of the paper.)

# %%
metrics = [json.loads(line) for line in (model / "metrics.jsonl").read_text().splitlines()]
columns = ["step", "classification", "propagation", "total"]
rows = [{name: line.get(name) for name in columns} for line in metrics]
display(Markdown(gpq.render(rows, "markdown", digits=5)))

# %% [markdown]
# ## Encode
#
# `encode` runs the network over all images, a batch at a time, and writes two files: `features.h5` with the
# vectors (float32, 12 sub-vectors of 18 dimensions, each of length one) and `codes.h5` with the codes. If it is killed, the
# next call resumes.

# %%
codes_file = gpq.encode(model, digits, run / "codes.h5", overwrite=True)
with gpq.RowReader(codes_file) as reader:
    codes, ids = reader.values, reader.ids
print("codes:", codes.dtype, codes.shape)
print(
    f"{digits.read(np.arange(1))[0].nbytes} bytes of pixels became {codes.shape[1]} bytes of code"
)

# %% [markdown]
# One code, bit by bit. Each of the 12 codebooks has 16 codewords, so it takes 4 bits: the number of the codeword.

# %%
# Faiss packs the low four bits first.
nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
print("image 0, a", labels.class_names[labels.dense(np.arange(1))[0].argmax()])
print("bytes    ", codes[0].tolist())
print("codewords", nibbles[0].tolist())
print("bits     ", " ".join(f"{codeword:04b}" for codeword in nibbles[0]))

# %% [markdown]
# Images of one class share most of their codewords, others hardly any. That is what makes the short code
# rank by meaning:

# %%
truth = labels.dense().argmax(axis=1)
shared = (nibbles[:, None, :] == nibbles[None, :, :]).sum(axis=2)
same = truth[:, None] == truth[None, :]
others = ~np.eye(len(truth), dtype=bool)
within, across = shared[same & others].mean(), shared[~same].mean()
print(f"codewords in common, of 12: {within:.1f} within a class, {across:.1f} across classes")
print(f"distinct codes: {len(np.unique(codes, axis=0))} for {len(codes):,} images")

# %% [markdown]
# ## The Faiss index
#
# `export_faiss` puts the learned codebooks into an empty `IndexPQ`; `index` fills one with the codes, under your
# own ids.

# %%
gpq.export_faiss(model, run / "empty.faiss", overwrite=True)
index_file = gpq.index(model, codes_file, run / "index.faiss", overwrite=True)

# %% [markdown]
# From here on it is an ordinary Faiss index. Nothing of this package is needed to open and search it. (Not every result
# is right; how many are is measured below.)

# %%
opened = faiss.read_index(str(index_file))
inner = faiss.downcast_index(opened.index)
print(type(opened).__name__, "around", type(inner).__name__)
print(f"{opened.ntotal:,} items of {inner.sa_code_size()} bytes, vectors of {opened.d} dimensions")
print("metric:", {faiss.METRIC_INNER_PRODUCT: "inner product"}[opened.metric_type])

vectors, _ = gpq.Encoder.load(model).embed(
    digits.read(np.arange(3)), queries=True
)  # the first three images
scores, found = opened.search(vectors, 6)
for query, near in enumerate(found):
    print(
        f"image {query} (a {truth[query]}): ids {near.tolist()} are of class {truth[near].tolist()}"
    )

# %% [markdown]
# ## Evaluate
#
# `evaluate` ranks the database for the images that the training never saw, by their codes. Beside our codes (`posterior`) stand methods
# that do without labels: product quantisation, its optimised form and iterative quantisation at the same 48 bits, and the exact
# search on the pixels. mAP counts the full ranking, and gives equal scores their expected value over random order.

# %%
evaluation = gpq.evaluate(model, digits, compare=("pq", "opq", "itq", "float"))
display(Markdown(gpq.render(evaluation.rows(ks=(10, 100)), "markdown")))

# %% [markdown]
# `float` is no upper bound: the pixels know nothing of classes, and the 20 labels per class are what the codes add.
# `docs/results.md` has figures on larger data.
#
# ## Search
#
# `search` takes queries that are images. Here they are four of those that training never saw. They are in the
# index as well, so each may find itself, too; where scores are equal, smaller ids come first.

# %%
asked = evaluation.queries[:: len(evaluation.queries) // 4][:4]
result = gpq.search(model, index_file, digits, rows=",".join(map(str, asked)), k=8)
gallery = result.draw(digits, digits, run / "gallery.png", overwrite=True)
display(Image(filename=gallery, width=760))

# %% [markdown]
# The number under each result is its score: the inner product of the query's vector with the codewords of the item,
# 12 at most. The query itself is not quantised.
#
# ## Query without torch
#
# A service needs the network, not the training. `export_encoder` writes it as one ONNX file, after checking that the
# file gives the same vectors as the model.

# %%
encoder = gpq.export_encoder(model, run / "encoder.onnx", overwrite=True)
np.save(
    run / "queries.npy",
    np.stack([digits.read(asked)[i].transpose(2, 0, 1) for i in range(len(asked))]),
)

# %% [markdown]
# This is the whole service, in a process of its own:

# %%
service = run / "service.py"
service.write_text(
    """\
import sys

import faiss
import numpy as np
import onnxruntime

index = faiss.read_index("index.faiss")
network = onnxruntime.InferenceSession("encoder.onnx", providers=["CPUExecutionProvider"])
images = np.load("queries.npy").astype(np.float32) / 255  # RGB [n, 3, 8, 8] in [0, 1]
(vectors,) = network.run(None, {"images": images})
scores, ids = index.search(vectors, 5)
print("torch is loaded:", "torch" in sys.modules)
print(np.round(scores, 2))
print(ids)
"""
)
finished = subprocess.run(
    [sys.executable, service.name], cwd=run, check=True, capture_output=True, text=True
)
print(finished.stdout)

# %% [markdown]
# The scores are those of `search` above (ids of equal scores may come in another order):

# %%
print(np.round(result.scores[:, :5], 2))
print("classes of the results:", [dict(Counter(truth[row].tolist())) for row in result.ids])

# %% [markdown]
# ## What next
#
# - **Embeddings instead of images** (CLIP, DINO ...): `02_your_embeddings.ipynb` replaces the product quantiser of a
#   Faiss pipeline.
# - **Your photographs**: `gpq.open_data("folder:photos")`, and leave the `network` section out of the settings.
#   `weights="imagenet"` starts from trained weights, `device="cuda"` runs on a GPU.
# - **Other code lengths**: `"codebooks": 3`, `6` or `8` give 12, 24 or 32 bits.
# - **The command line**: each function above is a command of the same name; `gpq --help` lists them.
