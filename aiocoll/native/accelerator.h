/* Python's limited API and NumPy's C API, the same in all files. */
#ifndef AIOCOLL_ACCELERATOR_H
#define AIOCOLL_ACCELERATOR_H

#if !defined(Py_LIMITED_API) || !defined(NPY_TARGET_VERSION)
#error "hatch_build.py sets the versions of both interfaces"
#endif

#define PY_SSIZE_T_CLEAN
#define PY_ARRAY_UNIQUE_SYMBOL aiocoll_array_api
#ifndef IMPORTS_NUMPY /* by module.c */
#define NO_IMPORT_ARRAY
#endif
#include <Python.h>

#include <numpy/arrayobject.h>

#include "layout.h"
#include "words.h"

#endif
