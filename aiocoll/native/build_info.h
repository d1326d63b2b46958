/* Build information of the extension module. */
#ifndef AIOCOLL_BUILD_INFO_H
#define AIOCOLL_BUILD_INFO_H

#include <Python.h>

/* Add to the module the constants that aiocoll/native/__init__.py checks. Return -1 with an exception on failure. */
int add_build_info(PyObject *module);

#endif
