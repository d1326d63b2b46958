/* Calls: the type that has the calls of one group; see starting.c and in_flight.c. */
#include "accelerator.h"

static PyObject *Calls_look(Calls *self, PyObject *Py_UNUSED(unused)) {
    int moved = self->count ? look_at_all(self) : 0;
    return moved < 0 ? NULL : PyBool_FromLong(moved);
}

static PyObject *Calls_hand_over(Calls *self, PyObject *args) {
    unsigned long long identity = 0;
    if (!PyArg_ParseTuple(args, "|K", &identity)) return NULL;
    /* What is called may end or hand over others, so it begins again from the first one. */
    for (Handle *call = self->first; call;) {
        if (identity && call->identity != identity) {
            call = call->next;
            continue;
        }
        if (hand_over(call) < 0) return NULL;
        call = self->first;
    }
    Py_RETURN_NONE;
}

/* Hand the calls that wait for slots over: frames need none. */
static PyObject *Calls_give_up(Calls *self, PyObject *Py_UNUSED(unused)) {
    self->gave_up = 1;
    while (self->first_waiting)
        if (hand_over(self->first_waiting) < 0) return NULL;
    Py_RETURN_NONE;
}

/* Return operations like the calls in flight, for readers in any thread. Python may run other threads meanwhile, so a
   call may end while it is copied. */
static PyObject *Calls_copies(Calls *self, PyObject *Py_UNUSED(unused)) {
    PyObject *calls = PyList_New(0), *copies = calls ? PyList_New(0) : NULL;
    for (Handle *call = self->first; copies && call; call = call->next)
        if (PyList_Append(calls, (PyObject *)call) < 0) Py_CLEAR(copies);
    for (Py_ssize_t i = 0; copies && i < PyList_Size(calls); i++) {
        Handle *call = (Handle *)PyList_GetItem(calls, i);
        PyObject *arrays = call->arrays;
        if (!call->is_in_flight || !arrays) continue;
        KEEP(arrays);
        PyObject *completion = completion_of(call, Py_None, Py_None), *copy = NULL;
        if (completion && !call->is_in_flight) { /* it has ended meanwhile */
            DROP(arrays);
            DROP(completion);
            continue;
        }
        if (completion) copy = operation_of(call, arrays, completion);
        DROP(arrays);
        DROP(completion);
        if (!copy || PyList_Append(copies, copy) < 0) Py_CLEAR(copies);
        DROP(copy);
    }
    DROP(calls);
    return copies;
}

static PyObject *Calls_relink(Calls *self, PyObject *Py_UNUSED(unused)) {
    self->epoch++;
    Py_RETURN_NONE;
}

static PyObject *attribute(PyObject *object, const char *name, PyObject **place) {
    return *place = PyObject_GetAttrString(object, name);
}

/* Calls(comm, owner, work_type, seams, folder, group, rank, size, spin, crowded): `seams` are functions of Python,
   `folder` is that of the package. */
static int Calls_init(Calls *self, PyObject *args, PyObject *kwargs) {
    PyObject *seams, *turn, *journal = NULL, *endpoint = NULL, *loop = NULL, *stalls = NULL;
    int failed = -1;
    unsigned long long group;
    if (self->work_type) return PyErr_SetString(PyExc_TypeError, "they were initialized before"), -1;
    if (!PyArg_ParseTuple(args, "OOOO!UKiidp", &self->comm, &self->owner, &self->work_type, &PyDict_Type, &seams,
                          &self->folder, &group, &self->rank, &self->size, &self->spin, &self->is_crowded)) {
        self->comm = self->owner = self->work_type = self->folder = NULL;
        return -1;
    }
    KEEP(self->comm), KEEP(self->work_type), KEEP(self->folder);
    if (!(self->owner = PyWeakref_NewRef(self->owner, NULL))) return -1;
    if (!PyType_Check(self->work_type) || PyObject_IsSubclass(self->work_type, (PyObject *)Handle_type) != 1) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "works need the base of this module");
        return -1;
    }
    if (self->size < 1 || self->rank < 0 || self->rank >= self->size)
        return PyErr_SetString(PyExc_ValueError, "there is no such rank"), -1;
    if (!(self->peers = PyMem_Calloc(self->size, sizeof *self->peers))) return PyErr_NoMemory(), -1;
    self->group = group;
    self->shift = (uint32_t)(group % LAYOUT_SMALL_SLOTS);
    self->epoch = 1;
    self->allocate = (allocfunc)PyType_GetSlot((PyTypeObject *)self->work_type, Py_tp_alloc);
    struct {
        const char *name;
        PyObject **place;
    } functions[] = {{"resolve", &self->resolve},
                     {"make_steps", &self->make_steps},
                     {"flatten", &self->flatten},
                     {"find_parts", &self->find_parts},
                     {"find_one", &self->find_one},
                     {"remember", &self->remember},
                     {"operation", &self->operation},
                     {"guard", &self->guard},
                     {"overwritten", &self->overwritten},
                     {"rest", &self->rest},
                     {"quiet", &self->quiet},
                     {"wait", &self->wait}};
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        PyObject *found = PyDict_GetItemString(seams, functions[i].name);
        if (!found) return PyErr_Format(PyExc_KeyError, "%s", functions[i].name), -1;
        KEEP(found), *functions[i].place = found;
    }
    if (!attribute(self->comm, "left", &self->left) || !attribute(self->comm, "early", &self->early)) goto end;
    if (!attribute(self->comm, "hooks", &self->hooks) || !attribute(self->comm, "stalls", &stalls)) goto end;
    if (!attribute(stalls, "asked_early", &self->asked_early) || !attribute(self->comm, "endpoint", &endpoint))
        goto end;
    if (!attribute(endpoint, "watch", &self->watch) || !attribute(endpoint, "runtime", &self->runtime)) goto end;
    if (!attribute(endpoint, "polling", &self->polling) || !attribute(endpoint, "loop", &loop)) goto end;
    if (!attribute(loop, "is_running", &self->is_running) || !attribute(loop, "create_future", &self->create_future))
        goto end;
    if (!attribute(self->polling, "turn", &turn)) goto end;
    failed = PyObject_GetBuffer(turn, &self->turn, PyBUF_WRITABLE);
    DROP(turn);
    if (!failed && self->turn.len < (Py_ssize_t)sizeof(double))
        failed = (PyErr_SetString(PyExc_ValueError, "the turn is a number"), -1);
    self->thread = PyThread_get_thread_ident();
    self->forks = forks_of_process;
    if (!failed && (failed = !attribute(self->comm, "journal", &journal) ? -1 : 0) == 0)
        failed = journal_open(&self->journal, journal, self->size);
end:
    DROP(journal);
    self->progress = endpoint;
    DROP(loop);
    DROP(stalls);
    return failed;
}

static int Calls_traverse(Calls *self, visitproc visit, void *arg) {
    Py_VISIT(TYPE_OF(self));
    PyObject *objects[] = {self->comm,
                           self->owner,
                           self->work_type,
                           self->resolve,
                           self->make_steps,
                           self->find_one,
                           self->find_parts,
                           self->flatten,
                           self->remember,
                           self->operation,
                           self->guard,
                           self->overwritten,
                           self->left,
                           self->early,
                           self->asked_early,
                           self->hooks,
                           self->watch,
                           self->runtime,
                           self->polling,
                           self->is_running,
                           self->create_future,
                           self->rest,
                           self->quiet,
                           self->progress,
                           self->journal.journal,
                           self->journal.ring,
                           self->journal.objects,
                           self->wait};
    for (size_t i = 0; i < sizeof objects / sizeof *objects; i++) Py_VISIT(objects[i]);
    for (int i = 0; i < self->size && self->peers; i++) Py_VISIT(self->peers[i]);
    for (int i = 0; i < KNOWN; i++) {
        Py_VISIT(self->known[i].steps);
        Py_VISIT(self->known[i].op);
        Py_VISIT(self->known[i].root);
    }
    for (Handle *call = self->first; call; call = call->next) Py_VISIT(call);
    return 0;
}

/* Let go of the group. What works that have ended refer to stays: the loop, and the owner, which refuses calls from now
 * on. */
static void leave_group(Calls *self) {
    PyObject **places[] = {&self->comm,    &self->resolve,  &self->make_steps,  &self->find_one,  &self->find_parts,
                           &self->flatten, &self->remember, &self->operation,   &self->guard,     &self->overwritten,
                           &self->left,    &self->early,    &self->asked_early, &self->hooks,     &self->watch,
                           &self->rest,    &self->quiet,    &self->folder,      &self->last_file, &self->timeout,
                           &self->wait};
    while (self->first) {
        Handle *call = self->first;
        unlink_call(call);
        DROP(call);
    }
    for (int i = 0; i < self->size && self->peers; i++) Py_CLEAR(self->peers[i]);
    for (int i = 0; i < KNOWN; i++) forget(self->known + i);
    journal_close(&self->journal);
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) Py_CLEAR(*places[i]);
}

static int Calls_clear(Calls *self) {
    leave_group(self);
    Py_CLEAR(self->owner);
    Py_CLEAR(self->work_type);
    Py_CLEAR(self->runtime);
    Py_CLEAR(self->polling);
    Py_CLEAR(self->is_running);
    Py_CLEAR(self->create_future);
    Py_CLEAR(self->progress);
    return 0;
}

static PyObject *Calls_close(Calls *self, PyObject *Py_UNUSED(unused)) {
    leave_group(self);
    Py_RETURN_NONE;
}

static void Calls_dealloc(Calls *self) {
    PyObject_GC_UnTrack(self);
    Calls_clear(self);
    PyBuffer_Release(&self->turn);
    PyMem_Free(self->peers);
    PyMem_Free(self->scratch);
    free_object(self);
}

static PyMethodDef Calls_methods[] = {
    {"start", (PyCFunction)(void (*)(void))Calls_start, METH_FASTCALL, "Start a prepared collective."},
    {"one", (PyCFunction)(void (*)(void))Calls_one, METH_FASTCALL, "Start a collective on one array."},
    {"parts", (PyCFunction)(void (*)(void))Calls_parts, METH_FASTCALL,
     "Start a collective on an array of equal parts; None if it is not plain."},
    {"look", (PyCFunction)Calls_look, METH_NOARGS, "Look at all calls in flight; return whether any has moved."},
    {"hand_over", (PyCFunction)Calls_hand_over, METH_VARARGS,
     "Hand the call with this id, or all calls, over to Python."},
    {"give_up", (PyCFunction)Calls_give_up, METH_NOARGS, "Hand the calls that wait for slots over to Python."},
    {"copies", (PyCFunction)Calls_copies, METH_NOARGS,
     "Return operations like the calls in flight, for readers in any thread."},
    {"relink", (PyCFunction)Calls_relink, METH_NOARGS, "Forget what follows from the links of the group."},
    {"close", (PyCFunction)Calls_close, METH_NOARGS, "Let go of the group."},
    {0}};
static PyMemberDef Calls_members[] = {
    {"count", T_PYSSIZET, offsetof(Calls, count), READONLY, "Calls in flight."},
    {"waiting", T_PYSSIZET, offsetof(Calls, waiting), READONLY, "Calls among them that wait for slots."},
    {"shift", T_UINT, offsetof(Calls, shift), 0, "Added to the id of an operation to find its slot."},
    {"watches", T_INT, offsetof(Calls, watches), 0, "Whether a work that is never awaited leads to a warning."},
    {"comm", T_OBJECT_EX, offsetof(Calls, comm), READONLY, "The group."},
    {0}};
static PyType_Slot Calls_slots[] = {{Py_tp_doc, "The calls of one group that are carried out in C."},
                                    {Py_tp_new, PyType_GenericNew},
                                    {Py_tp_init, Calls_init},
                                    {Py_tp_traverse, Calls_traverse},
                                    {Py_tp_clear, Calls_clear},
                                    {Py_tp_dealloc, Calls_dealloc},
                                    {Py_tp_methods, Calls_methods},
                                    {Py_tp_members, Calls_members},
                                    {0}};
PyType_Spec Calls_spec = {"aiocoll.native._core.Calls", sizeof(Calls), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                          Calls_slots};
