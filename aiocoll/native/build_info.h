/* What the extension module was built for. */
#ifndef AIOCOLL_BUILD_INFO_H
#define AIOCOLL_BUILD_INFO_H

#include <Python.h>

/* Add the constants that aiocoll/native/__init__.py looks at; -1 with an exception if that fails. */
int add_build_info(PyObject *module);

#endif
