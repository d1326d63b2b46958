/* Build information of the extension module: the constants VERSION, LAYOUT, BUILT_FOR and BUILT_WITH. */
#include "build_info.h"

#include "accelerator.h"

/* Increment VERSION with each change of the interface to Python, here and in aiocoll/native/__init__.py. */
#define VERSION 2

#define BUILT_FOR "Python 3.11 and later, NumPy 2.0 and later"
_Static_assert(Py_LIMITED_API == 0x030b0000, "BUILT_FOR names this Python");
_Static_assert(NPY_TARGET_VERSION == NPY_2_0_API_VERSION, "BUILT_FOR names this NumPy");

/* Add LAYOUT, a dictionary with the constants of layout.h, to the module. */
static int add_layout(PyObject *module) {
    static const struct {
        const char *name;
        long value;
    } numbers[] = {
#define NUMBER(name) {#name, LAYOUT_##name},
        LAYOUT_NUMBERS(NUMBER)
#undef NUMBER
    };
    PyObject *layout = PyDict_New();
    if (layout == NULL) return -1;
    int failed = 0;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers && !failed; i++) {
        PyObject *value = PyLong_FromLong(numbers[i].value);
        failed = value == NULL || PyDict_SetItemString(layout, numbers[i].name, value) < 0;
        Py_XDECREF(value);
    }
    failed = failed || PyModule_AddObjectRef(module, "LAYOUT", layout) < 0;
    Py_DECREF(layout);
    return failed ? -1 : 0;
}

int add_build_info(PyObject *module) {
    if (PyModule_AddIntConstant(module, "VERSION", VERSION) < 0) return -1;
    if (PyModule_AddStringConstant(module, "BUILT_FOR", BUILT_FOR) < 0) return -1;
    if (PyModule_AddStringConstant(module, "BUILT_WITH", BUILT_WITH) < 0) return -1;
    return add_layout(module);
}
