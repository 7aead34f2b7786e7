"""Any codec of Faiss as a method, by the string of its ``index_factory``: ``faiss:RQ6x8``.

The names ``pq``, ``opq`` and ``itq`` stand for such strings:

* ``pq``, product quantisation (Jégou, Douze and Schmid, TPAMI 2011), is ``L2norm,PQ12x4`` at 48
  bits: k-means in each of M parts of the vector; the score is read from M tables of squared
  distances (asymmetric distance, eq. 13).
* ``opq``, its optimised form (Ge, He, Ke and Sun, CVPR 2013), is ``L2norm,OPQ12,PQ12x4``: a
  rotation R and the codebooks are trained alternately to reduce ||R x - q(R x)||² (the
  non-parametric solution, alg. 1).
* ``itq``, iterative quantisation (Gong, Lazebnik, Gordo and Perronnin, TPAMI 2013), is
  ``ITQ48,LSH``: the signs of principal components, rotated in 50 alternations as close as possible
  to their signs. Queries are coded as well and compared by Hamming distance.

``L2norm`` at the beginning scales vectors to unit length, so that L2 ranks like the cosine. On deep
features that ranks better: PQ of the CIFAR-10 features has mAP 0.287 in place of 0.268 at 12 bits.

Training is Faiss' own, with three differences: the seed determines the random numbers of PQ, OPQ,
RQ, LSQ and ITQ; product quantisers are trained on all rows; and OPQ rotates for the codebooks that
follow, not for 256 codewords. Vectors are zero-padded where M does not divide their width, which
does not change distances.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import faiss
import numpy as np

from ..config import codebooks_for_bits
from ..data.labels import Labels
from ..errors import UsageError
from ..faissio.kmeans import use_all_rows
from .coders import Coder, Codes, Floats, ProductCoder, dot_rows, hamming_tables
from .registry import FAISS


class FaissCodec(Coder):
    """A codec of Faiss by its factory string.

    Product quantisers and binary codes are scored by tables, other codecs by the L2 distance to the
    decoded vector, and RaBitQ, which estimates distances from the code, by Faiss' search of all
    lists.

    Args:
        description: the factory string; of methods with a ``name`` of their own ``{M}`` and
            ``{bits}`` stand for bits / 4 and the bits. The length of other codes follows from it.

    Raises:
        UsageError: Faiss has no such codec, or one whose codes cannot be ranked.
    """

    quantizer: ProductCoder | None = None
    M = 0

    def __init__(self, bits: int, *, description: str, name: str = "", seed: int = 0) -> None:
        self.name = name or f"{FAISS}{description}"
        self.fixed_length = bool(name)
        super().__init__(bits, seed=seed)
        if self.fixed_length:
            description = description.format(
                M=codebooks_for_bits(bits) if "{M}" in description else 0, bits=bits
            )
        self.description = description.removeprefix("L2norm,")
        self.unit = self.description != description
        self.multiple = math.lcm(*map(int, re.findall(r"(?:PQ|PRQ|PLSQ)(\d+)", description)))
        try:
            faiss.index_factory(64 * self.multiple, self.description)
            known = not re.search(r"RaBitQ\d*fs", description)  # Faiss does not read their codes
        except RuntimeError as error:
            known = "could not parse" not in str(error)
        if not known:
            raise UsageError(
                f"{self.name}: Faiss' index_factory has no codec of this name that can be ranked: "
                "choose another, such as faiss:RQ6x8"
            )

    def _fit(self, x: Floats, labels: Labels | None) -> None:
        try:
            self._train(self._padded(x))
        except RuntimeError as error:
            raise UsageError(
                f"{self.name}: Faiss refuses this codec for {len(x):,} training vectors of width "
                f"{x.shape[1]} ({str(error).strip().rpartition(': ')[2]}): leave it out, take a "
                "shorter code, or more training items"
            ) from None

    def _train(self, x: Floats) -> None:
        index: Any = faiss.index_factory(x.shape[1], self.description)
        self._index = index  # which owns its transforms, so it must live as long as they are used
        self._codec = index
        self._transforms: list[Any] = []
        if isinstance(index, faiss.IndexPreTransform):
            self._codec = faiss.downcast_index(index.index)
            chain: Any = index.chain
            self._transforms = [chain.at(i) for i in range(chain.size())]
        codec = self._codec
        pq = getattr(codec, "pq", None)
        if isinstance(codec, faiss.IndexPQ):
            self._codec.do_polysemous_training = False  # which only orders the codewords
        if pq is not None:
            use_all_rows(pq, self.seed)
        elif isinstance(codec, faiss.IndexResidualQuantizer):
            codec.rq.cp.seed = self.seed + 1
            codec.rq.cp.min_points_per_centroid = 1  # fewer than 39 only print a warning
        elif isinstance(codec, faiss.IndexLocalSearchQuantizer):
            codec.lsq.random_seed = self.seed + 1
        for transform in map(faiss.downcast_VectorTransform, self._transforms):
            if isinstance(transform, faiss.ITQTransform):
                transform.itq.seed = self.seed + 1
                transform.max_train_per_dim = -(-len(x) // x.shape[1])  # Faiss' default: 10 rows
            elif isinstance(transform, faiss.OPQMatrix):
                # Faiss would write behind the end of an array with fewer rows than dimensions.
                x = np.resize(x, (max(len(x), x.shape[1]), x.shape[1]))
                transform.max_train_points = len(x)  # Faiss' default: 65,536
                prepare_rotation(transform, 8 if pq is None else pq.nbits, self.seed)
        index.train(x)
        self.code_size = codec.sa_code_size()
        if not self.fixed_length:
            self.bits = 8 * self.code_size
        if isinstance(codec, faiss.IndexPQ) and 2 <= codec.pq.nbits <= 8:
            centroids = faiss.vector_to_array(codec.pq.centroids)
            self.quantizer = ProductCoder(centroids.reshape(codec.pq.M, codec.pq.ksub, -1), "l2")
            self.M, self.K = self.quantizer.M, self.quantizer.K
        elif isinstance(codec, faiss.IndexLSH):
            self.M, self.K = 2 * self.code_size, 16
        else:
            self._centre = self._transformed(x).mean(axis=0)
            self._score(x[:1], index.sa_encode(x[:1]))  # refuses what cannot be ranked

    def _padded(self, x: Floats) -> Floats:
        return np.pad(x, ((0, 0), (0, -x.shape[1] % self.multiple)))

    def _transformed(self, x: Floats) -> Floats:
        x = self._padded(x)
        for transform in self._transforms:
            x = transform.apply(x)
        return x

    def _encode(self, x: Floats) -> Codes:
        return np.asarray(self._codec.sa_encode(self._transformed(x)))

    def _tables(self, x: Floats) -> Floats | None:
        if self.quantizer is not None:
            return self.quantizer.score_tables(self._transformed(x))
        return hamming_tables(self._encode(x)) if self.M else None

    def _score(self, xq: Floats, codes: Codes) -> Floats:
        if self.M:
            return super()._score(xq, codes)
        xq = self._transformed(xq)
        if "RaBitQ" not in type(self._codec).__name__:
            # Far from the origin, the differences of squares would be lost in float32.
            decoded = self._codec.sa_decode(codes) - self._centre
            return np.asarray(
                2 * dot_rows(xq - self._centre, decoded) - np.square(decoded).sum(axis=1)
            )
        index: Any = faiss.clone_index(self._codec)
        index.add_sa_codes(codes)
        if isinstance(index, faiss.IndexIVF):
            index.nprobe = index.nlist
        distances, ids = index.search(xq, len(codes))
        return -np.take_along_axis(distances, ids.argsort(axis=1), axis=1)


def prepare_rotation(opq: Any, nbits: int, seed: int) -> None:
    """Let a ``faiss.OPQMatrix`` be trained for codebooks of ``nbits`` bits, by ``seed``."""
    opq.pq = faiss.ProductQuantizer(opq.d_out, opq.M, nbits)
    use_all_rows(opq.pq, seed)
    if opq.d_in == opq.d_out:  # else the rotation is initialised by Faiss
        draw = np.random.default_rng([seed, 0]).standard_normal((opq.d_in, opq.d_in))
        faiss.copy_array_to_vector(np.linalg.qr(draw)[0].astype(np.float32).ravel(), opq.A)


PQ = functools.partial(FaissCodec, name="pq", description="L2norm,PQ{M}x4")
OPQ = functools.partial(FaissCodec, name="opq", description="L2norm,OPQ{M},PQ{M}x4")
ITQ = functools.partial(FaissCodec, name="itq", description="ITQ{bits},LSH")
