/* The extension module aiocoll.native._core. */
#define IMPORTS_NUMPY
#include "accelerator.h"
#include "build_info.h"

static int exec_module(PyObject *module) {
    if (PyArray_ImportNumPyAPI() < 0) return -1;
    return add_build_info(module);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, exec_module}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "aiocoll.native._core",
    .m_doc = "The accelerator in C.",
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
