"""Array elements: dtypes, reductions, kernels, and flat views of arrays.

dtypes           element types on the wire, and exact conversions between narrow floats and float32
element_type     `DType`, an element type
records          types that are sent but not reduced: structured dtypes, dates, texts
ops              the reductions, and the types on which each is defined
kernels          computing the reductions of NumPy's number types
half_precision   computing the reductions of floats of at most 16 bits; `packed` is its fast path
logical          computing LAND, LOR and LXOR
narrow_integers  computing the reductions of integers of 4 and 2 bits
pairs            computing MINLOC and MAXLOC
nan_fingerprint  a hash of the NaNs that this process computes
adapters         the interface between aiocoll and array libraries, and the registry of adapters
buffers          flat views of arrays on the host
device           flat views of arrays on a device
allocate         new memory like an existing buffer; the check that buffers are on the same device
strides          the check that the elements of a strided array share no memory
entries          indices and values of sparse arrays
sparse           conversion between sparse arrays and entries
"""
