"""Search codes in PostgreSQL with pgvector, exactly.

A score is an inner product of the query's score table and a 0/1 vector of the item's codewords;
``<#>`` is minus the inner product. This reads ``model``, ``codes.parquet`` (``gpq export codes.h5
--to parquet``) and ``queries.npy``, and fills the table ``items`` of the database ``DATABASE_URL``.
Tested with PostgreSQL 18 and pgvector 0.8.5.
"""

import os

import numpy as np
import psycopg
import pyarrow.parquet

import gpq_faiss as gpq

gpq.export("model", "codebooks.npz", to="numpy", overwrite=True)
Z = np.load("codebooks.npz")["codebooks"]  # float32 [M, 16, d]
M, K, d = Z.shape

rows = pyarrow.parquet.read_table("codes.parquet").to_pydict()
codes = np.array(rows["codes"], np.uint8)
item_names = rows.get("name", [None] * len(codes))  # null without names
numbers = np.stack([codes & 15, codes >> 4], axis=2).reshape(len(codes), -1)[:, :M]
ones = 1 + K * np.arange(M) + numbers  # int64 [N, M], counted from 1

database = psycopg.connect(os.environ["DATABASE_URL"])
database.execute("create extension if not exists vector")
database.execute(f"create table items (id bigint primary key, name text, code sparsevec({M * K}))")
with database.cursor().copy("copy items from stdin") as copy:
    for i, name, row in zip(rows["id"], item_names, ones.tolist(), strict=True):
        copy.write_row((i, name, "{" + ",".join(f"{at}:1" for at in row) + f"}}/{M * K}"))
database.commit()

xq, _ = gpq.Encoder.load("model").embed(np.load("queries.npy")[:1], queries=True)
table = np.einsum("mkd,md->mk", Z, xq.reshape(M, d)).ravel()
query = "{" + ",".join(f"{at}:{score}" for at, score in enumerate(table, 1)) + f"}}/{M * K}"
nearest = database.execute(
    "select id, name, -(code <#> %(q)s::sparsevec) from items"
    " order by code <#> %(q)s::sparsevec, id limit 10",
    {"q": query},
).fetchall()

print(nearest)
