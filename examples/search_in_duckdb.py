"""Search codes in DuckDB, exactly: the score of an item is a sum of one table entry per byte of its
code.

It reads ``model``, ``codes.parquet`` (``gpq export codes.h5 --to parquet``) and ``queries.npy``.
Every code is read: this is for small tables.
"""

import duckdb
import numpy as np

import gpq_faiss as gpq

encoder = gpq.Encoder.load("model")
xq, _ = encoder.embed(np.load("queries.npy")[:1], queries=True)
gpq.export("model", "codebooks.npz", to="numpy", overwrite=True)
fused = np.load("codebooks.npz")["fused"]  # float32 [bytes, 256, 2d]
# An odd number of codebooks ends in half a byte.
padded = np.zeros(fused.shape[0] * fused.shape[2], np.float32)
padded[: xq.shape[1]] = xq[0]
tables = np.einsum("bkd,bd->bk", fused, padded.reshape(len(fused), -1))

found = duckdb.execute(
    """
    select id, list_sum([t[256 * i + codes[i + 1] + 1] for i in range(len(codes))]) as score
    from 'codes.parquet', (select $tables as t)
    order by score desc, id limit 10
    """,
    {"tables": tables.ravel().tolist()},
).fetchall()

print(found)
