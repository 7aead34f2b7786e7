import numpy as np
from safetensors.numpy import save_file, load_file
from safetensors import safe_open
from .lists import InvertedLists, ListArrays
def write_lists(out, sources, Z, *, metadata=None, memory=None):
    parts=[b for s in sources for b in s.blocks(1<<20)]
    c,i=(np.concatenate(a) for a in zip(*parts))
    l=InvertedLists.build(c,i,Z)
    d=l.arrays._asdict(); p=d.pop("prefix")
    save_file({k:np.ascontiguousarray(v) for k,v in d.items()},out,metadata={"crc":str(l.crc()),"prefix":str(p)})
    return l.crc()
def open_lists(path):
    d=load_file(path)
    with safe_open(path,"np") as f: m=f.metadata()
    return ListArrays(**d,prefix=int(m["prefix"])),m
