import numpy as np
from safetensors.numpy import save_file, load_file
from safetensors import safe_open
from .lists import InvertedLists, ListArrays
def write_lists(out, sources, Z, *, metadata=None, memory=None):
    parts=[b for s in sources for b in s.blocks(1<<20)]
    c,i=(np.concatenate(a) for a in zip(*parts))
    l=InvertedLists.build(c,i,Z)
    save_file({k:np.ascontiguousarray(v) for k,v in l.arrays._asdict().items()},out,metadata={"crc":str(l.crc()),"prefix":str(l.prefix)})
    return l.crc()
def open_lists(path):
    d=load_file(path)
    with safe_open(path,"np") as f: m=f.metadata()
    return ListArrays(**d),m
