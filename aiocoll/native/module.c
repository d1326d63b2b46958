/* The extension module `aiocoll.native._core`: its types, constants and initialization. */
#define IMPORTS_NUMPY
#include "accelerator.h"
#include "build_info.h"

#include <pthread.h>

PyTypeObject *CommonLane_type, *PeerLanes_type, *Steps_type, *Handle_type, *Calls_type, *Iteration_type, *Block_type;

PyObject *name_back, *name_barrier, *name_closed, *name_default_timeout, *name_group, *name_least_timeout, *name_shape,
    *name_file, *name_instruction, *name_interceptor, *name_native, *name_spun, *name_steps;

static int intern_names(void) {
    struct {
        PyObject **place;
        const char *name;
    } names[] = {{&name_back, "f_back"},
                 {&name_barrier, "barrier"},
                 {&name_closed, "closed"},
                 {&name_group, "group"},
                 {&name_interceptor, "interceptor"},
                 {&name_default_timeout, "default_timeout"},
                 {&name_least_timeout, "least_timeout"},
                 {&name_shape, "shape"},
                 {&name_file, "co_filename"},
                 {&name_instruction, "f_lasti"},
                 {&name_native, "native"},
                 {&name_spun, "spun"},
                 {&name_steps, "steps"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(*names[i].place = PyUnicode_InternFromString(names[i].name))) return -1;
    return 0;
}

static PyObject *configure(PyObject *module, PyObject *args) {
    PyObject *await_, *done, *result, *exception, *make;
    if (!PyArg_ParseTuple(args, "OOOOO", &await_, &done, &result, &exception, &make)) return NULL;
    PyObject *given[] = {await_, done, result, exception, make};
    PyObject **places[] = {&reference_await, &reference_done, &reference_result, &reference_exception,
                           &make_completion};
    for (int i = 0; i < 5; i++) {
        KEEP(given[i]);
        SET_REFERENCE(*places[i], given[i]);
    }
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {{"configure", configure, METH_VARARGS,
                                   "configure(await_, done, result, exception, make_completion, /)\n--\n\nSet the "
                                   "functions of the reference that works call."},
                                  {0}};

static int add_types(PyObject *module) {
    struct {
        PyTypeObject **place;
        PyType_Spec *spec;
        const char *name;
    } types[] = {{&CommonLane_type, &CommonLane_spec, "CommonLane"},
                 {&PeerLanes_type, &PeerLanes_spec, "PeerLanes"},
                 {&Steps_type, &Steps_spec, "Steps"},
                 {&Handle_type, &Handle_spec, "Handle"},
                 {&Calls_type, &Calls_spec, "Calls"},
                 {&Iteration_type, &Iteration_spec, NULL},
                 {&Block_type, &Block_spec, NULL}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (!(*types[i].place = (PyTypeObject *)PyType_FromSpec(types[i].spec))) return -1;
        if (types[i].name && PyModule_AddObjectRef(module, types[i].name, (PyObject *)*types[i].place) < 0) return -1;
    }
    return 0;
}

/* Number of forks from the first process to this one. Groups compare it, because a forked child must not use its
   parent's groups although it has a copy of their thread and loop. */
unsigned long forks_of_process;
static void count_fork(void) { forks_of_process++; }

static int exec_module(PyObject *module) {
    /* The only interpreter that may use this module's types and interned names. */
    static PyInterpreterState *interpreter;
    if (interpreter && interpreter != PyInterpreterState_Get()) {
        PyErr_SetString(PyExc_ImportError, "another interpreter of this process already uses the accelerator");
        return -1;
    }
    interpreter = PyInterpreterState_Get();
    if (PyArray_ImportNumPyAPI() < 0 || PyUFunc_ImportUFuncAPI() < 0) return -1;
    static int is_watching;
    if (!is_watching && (is_watching = 1)) pthread_atfork(NULL, NULL, count_fork);
    return intern_names() < 0 || add_types(module) < 0 ? -1 : add_build_info(module);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, exec_module}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "aiocoll.native._core", .m_doc = "The accelerator in C.", .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
