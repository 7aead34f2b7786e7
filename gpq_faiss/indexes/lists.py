from typing import NamedTuple, Any
import zlib
import numpy as np
from ..codes.bits import unpack_codes, pack_codes
from ..codes.scores import score_tables


class ListArrays(NamedTuple):
    codebooks: Any
    codes_: Any
    members: Any


def code_columns(codes, M, K):
    if K == 16:
        return codes
    indices = unpack_codes(codes, M, K)
    return pack_codes(indices, 16) if K < 16 else np.ascontiguousarray(indices)


class InvertedLists:
    def __init__(self, arrays):
        self.arrays = arrays
        self.n = len(arrays.members)

    @classmethod
    def build(cls, codes, ids, Z):
        sw = codes << 4 | codes >> 4
        order = np.lexsort((ids, *sw.T[::-1]))
        return cls(ListArrays(Z, np.asarray(codes)[order], np.asarray(ids)[order]))

    def codes(self, start=0, stop=None):
        return self.arrays.codes_[start:stop]

    def crc(self):
        return zlib.crc32(
            self.arrays.members.tobytes(), zlib.crc32(np.ascontiguousarray(self.codes()).tobytes())
        )

    def positions(self, ids):
        o = np.argsort(self.arrays.members)
        s = self.arrays.members[o]
        p = np.searchsorted(s, ids).clip(max=self.n - 1)
        return np.where(s[p] == ids, o[p], -1)

    def _scores(self, xq):
        Z = self.arrays.codebooks
        w = unpack_codes(self.arrays.codes_, *Z.shape[:2]).T
        t = (
            score_tables(xq, Z)
            if np.allclose(np.linalg.norm(Z, axis=2), 1, atol=1e-3)
            else np.stack(
                [np.stack([Z[m] @ x.reshape(len(Z), -1)[m] for m in range(len(Z))]) for x in xq]
            )
        )
        parts = [t[:, m, word] for m, word in enumerate(w)]
        pairs = [sum(parts[m + 1 : m + 2], parts[m]) for m in range(0, len(parts), 2)]
        return np.asarray(sum(pairs[1:], pairs[0]), np.float32)

    def search(self, xq, k, *, mask=None, threads=None):
        S = self._scores(xq)
        D = np.full((len(xq), k), -np.inf, np.float32)
        I = np.full((len(xq), k), -1)
        rows = np.arange(self.n) if mask is None else np.flatnonzero(mask)
        for q in range(len(xq)):
            o = rows[np.lexsort((self.arrays.members[rows], -S[q, rows]))][:k]
            D[q, : len(o)] = S[q, o]
            I[q, : len(o)] = self.arrays.members[o]
        return D, I

    def range_search(self, query, min_score, limit, *, mask=None):
        S = self._scores(query[None])[0]
        ok = S >= np.float32(min_score)
        if mask is not None:
            ok &= mask
        r = np.flatnonzero(ok)
        r = r[np.lexsort((self.arrays.members[r], -S[r]))]
        return S[r], self.arrays.members[r]
