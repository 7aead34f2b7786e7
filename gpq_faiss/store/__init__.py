"""The files between the stages: ``features.h5`` and ``codes.h5``, and the only code that touches HDF5.

A file is written once and never changed. While it grows, its columns are raw files in ``.<name>.partial/``
beside it: an HDF5 file cut off by ``kill -9`` cannot be trusted, while a raw column is whole up to the
last row that ``progress.json`` records. At the end the columns stream into one HDF5 file.

Layout (HDF5 1.10 format, whose metadata carry checksums; the chunks do through fletcher32):

=============  ========================  ============================================================
dataset        type                      meaning
=============  ========================  ============================================================
``features``   float32 [N, M*d]          intra-normalised network output (kind ``features``)
``codes``      uint8 [N, code_size]      codes as Faiss packs them (kind ``codes``)
``ids``        int64 [N]                 what a search returns
``labels``     uint8 [N, ceil(C/8)]      multi-hot, ``np.packbits`` order, zero row unlabelled; optional
``text.NAME``  uint8 [bytes]             texts of a column (``name``: the path or key of each item), UTF-8; optional
``….ends``     int64 [N]                 where each text of ``text.NAME`` ends
``codebooks``  float32 [M, K, d]         z' of the model (eq. 1 applied to the sub-prototypes)
=============  ========================  ============================================================
"""

from .arrays import read_arrays, write_arrays
from .foreign import Hdf5Array, read_hdf5_array
from .header import FORMAT_VERSION, Header, Kind, codebooks_fingerprint
from .items import Item, ItemBlock, Items, items_path, write_items
from .reader import RowReader, describe
from .texts import Texts, as_texts
from .writer import RowWriter

__all__ = [
    "FORMAT_VERSION",
    "Hdf5Array",
    "Header",
    "Item",
    "ItemBlock",
    "Items",
    "Kind",
    "RowReader",
    "RowWriter",
    "Texts",
    "as_texts",
    "codebooks_fingerprint",
    "describe",
    "items_path",
    "read_arrays",
    "read_hdf5_array",
    "write_arrays",
    "write_items",
]
