"""Elements of arrays: their types, reductions and kernels, and any array as a flat view.

dtypes           the element types on the wire, and exact conversions between the narrow ones and float32
element_type     `DType`; `records` are those that only move: structured dtypes, dates, texts
ops              the reductions, and the types on which each is defined
kernels          their computation; `half_precision` and `packed` are for floats of 16 bits and fewer, `logical`
                 for LAND, LOR and LXOR, `narrow_integers` for those of 4 and 2 bits,
                 `pairs` for MINLOC and MAXLOC
nan_fingerprint  which NaN the arithmetic of this process makes
adapters         the interface of array libraries, and their registry
buffers          any array -> a flat view of its memory
allocate         new memory like a buffer's, and whether buffers are on the same device
device           the flat view of memory on a device
strides          strided arrays whose elements share memory
entries          indices and values of sparse arrays; `sparse` reads them from scipy's, and finds the adapter of others
"""
