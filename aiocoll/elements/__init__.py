"""What arrays hold: element types, reductions and their kernels, and any array as a flat view.

dtypes       the types that travel, and exact conversions between the narrow ones and float32
ops          which reductions there are, and on which types each is defined
kernels      how they are computed; `halves` and `packed` are those of floats of 16 bits and fewer
buffers      any array -> a flat view on its memory
alike        new memory like a buffer's, and whether buffers lie in one place
device       that view where the memory is a CUDA device's; `device_views` makes it of arrays of CuPy, torch and others
entries      places and values of sparse arrays; `sparse` reads them from scipy's and torch's
"""
