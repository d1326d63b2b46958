/* The Python type `Calls`, which holds one group's calls in flight. starting.c and in_flight.c contain the calls'
   code. */
#include "accelerator.h"

static PyObject *Calls_look(Calls *self, PyObject *Py_UNUSED(unused)) {
    int moved = self->count ? look_at_all(self) : 0;
    if (!self->relays && self->lookers && PyDict_GetItemWithError(self->lookers, (PyObject *)self) &&
        PyDict_DelItem(self->lookers, (PyObject *)self) < 0)
        return NULL;
    return moved < 0 ? NULL : PyBool_FromLong(moved);
}

static PyObject *Calls_hand_over(Calls *self, PyObject *args) {
    unsigned long long identity = 0;
    if (!PyArg_ParseTuple(args, "|K", &identity)) return NULL;
    /* Start again from the first call after each hand-over, which may have ended or handed over other calls. */
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

/* Hand over all calls that wait for slots to Python, which can send the data in frames instead of slots. */
static PyObject *Calls_give_up(Calls *self, PyObject *Py_UNUSED(unused)) {
    self->gave_up = 1;
    while (self->first_waiting)
        if (hand_over(self->first_waiting) < 0) return NULL;
    Py_RETURN_NONE;
}

/* Return copies of the calls in flight, as Python operations that any thread may read.

   Python may run other threads during the copying, so a call may end while C code copies it. */
static PyObject *Calls_copies(Calls *self, PyObject *Py_UNUSED(unused)) {
    PyObject *calls = PyList_New(0), *copies = calls ? PyList_New(0) : NULL;
    for (Handle *call = self->first; copies && call; call = call->next)
        if (PyList_Append(calls, (PyObject *)call) < 0) Py_CLEAR(copies);
    for (Py_ssize_t i = 0; copies && i < PyList_Size(calls); i++) {
        Handle *call = (Handle *)PyList_GetItem(calls, i);
        PyObject *arrays = call->arrays;
        if (!call->is_in_flight || !arrays || call->block)
            continue; /* skip a block's call, which its flush represents */
        KEEP(arrays);
        PyObject *completion = completion_of(call, Py_None, Py_None), *copy = NULL;
        if (completion && !call->is_in_flight) { /* the call has ended while `completion_of` ran */
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

/* Get the buffer of a Python array in the attribute `name`. Python never replaces this array. */
static int view_numbers(PyObject *object, const char *name, Py_buffer *view, size_t nbytes) {
    PyObject *found = PyObject_GetAttrString(object, name);
    int failed = found ? PyObject_GetBuffer(found, view, PyBUF_WRITABLE) : -1;
    DROP(found);
    if (!failed && view->len < (Py_ssize_t)nbytes)
        failed = (PyErr_Format(PyExc_ValueError, "%s has too few elements", name), -1);
    return failed;
}

/* `seams` is a dictionary of Python functions that this type calls. `folder` is the directory of the package. */
static int Calls_init(Calls *self, PyObject *args, PyObject *kwargs) {
    PyObject *seams, *journal = NULL, *endpoint = NULL, *loop = NULL, *stalls = NULL, *hooks = NULL;
    int failed = -1;
    unsigned long long group;
    if (self->work_type) return PyErr_SetString(PyExc_TypeError, "the object is already initialized"), -1;
    if (!PyArg_ParseTuple(args, "OOOO!UKiidp", &self->comm, &self->owner, &self->work_type, &PyDict_Type, &seams,
                          &self->folder, &group, &self->rank, &self->size, &self->spin, &self->is_crowded)) {
        self->comm = self->owner = self->work_type = self->folder = NULL;
        return -1;
    }
    KEEP(self->comm), KEEP(self->work_type), KEEP(self->folder);
    if (!(self->owner = PyWeakref_NewRef(self->owner, NULL))) return -1;
    if (!PyType_Check(self->work_type) || PyObject_IsSubclass(self->work_type, (PyObject *)Handle_type) != 1) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "work_type must be a subclass of Handle");
        return -1;
    }
    if (self->size < 1 || self->rank < 0 || self->rank >= self->size)
        return PyErr_SetString(PyExc_ValueError, "rank must be from 0 to size - 1"), -1;
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
                     {"find_lists", &self->find_lists},
                     {"find_barrier", &self->find_barrier},
                     {"remember", &self->remember},
                     {"operation", &self->operation},
                     {"guard", &self->guard},
                     {"overwritten", &self->overwritten},
                     {"stop_polling", &self->stop_polling},
                     {"quiet", &self->quiet},
                     {"wait", &self->wait},
                     {"scope", &self->scope}};
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        PyObject *found = PyDict_GetItemString(seams, functions[i].name);
        if (!found) return PyErr_Format(PyExc_KeyError, "%s", functions[i].name), -1;
        KEEP(found), *functions[i].place = found;
    }
    if (!attribute(self->comm, "left", &self->left) || !attribute(self->comm, "early", &self->early)) goto end;
    if (!attribute(self->comm, "hooks", &hooks) || !attribute(hooks, "active", &self->hooks)) goto end;
    if (!attribute(self->comm, "stalls", &stalls)) goto end;
    if (!attribute(stalls, "asked_early", &self->asked_early) || !attribute(self->comm, "endpoint", &endpoint))
        goto end;
    if (!attribute(endpoint, "watch", &self->watch) || !attribute(endpoint, "runtime", &self->runtime)) goto end;
    if (!attribute(endpoint, "polling", &self->polling) || !attribute(endpoint, "loop", &loop)) goto end;
    if (!attribute(loop, "is_running", &self->is_running) || !attribute(loop, "create_future", &self->create_future))
        goto end;
    if (!attribute(self->polling, "lookers", &self->lookers) || !PyDict_Check(self->lookers)) goto end;
    if (!attribute(self->runtime, "due", &self->due)) goto end;
    failed = view_numbers(self->polling, "turn", &self->turn, sizeof(double));
    if (!failed) failed = view_numbers(self->watch, "armed", &self->armed, 1);
    if (!failed) failed = view_numbers(self->comm, "gate", &self->gate, GATE * sizeof(int64_t));
    if (!failed && (!PyList_Check(self->hooks) || !PyList_Check(self->due)))
        failed = (PyErr_SetString(PyExc_TypeError, "hooks and callbacks must be lists"), -1);
    self->thread = PyThread_get_thread_ident();
    self->forks = forks_of_process;
    if (!failed && (failed = !attribute(self->comm, "journal", &journal) ? -1 : 0) == 0)
        failed = journal_open(&self->journal, journal, self->size);
end:
    DROP(journal);
    DROP(hooks);
    self->progress = endpoint;
    DROP(loop);
    DROP(stalls);
    return failed;
}

/* Offsets of references: OF_GROUP until the group is closed, OF_WORKS also later. Ended works still need the loop,
   and the owner, which rejects calls after the close. */
#define AT(member) offsetof(Calls, member)
static const size_t OF_GROUP[] = {AT(comm),       AT(resolve),      AT(make_steps),   AT(find_one), AT(find_parts),
                                  AT(find_lists), AT(find_barrier), AT(flatten),      AT(remember), AT(operation),
                                  AT(guard),      AT(overwritten),  AT(left),         AT(early),    AT(asked_early),
                                  AT(hooks),      AT(watch),        AT(stop_polling), AT(quiet),    AT(wait),
                                  AT(folder),     AT(timeout),      AT(scope)};
static const size_t OF_WORKS[] = {AT(owner),      AT(work_type),     AT(runtime),  AT(polling), AT(due),
                                  AT(is_running), AT(create_future), AT(progress), AT(lookers)};
#define COUNT_OF(table) (sizeof table / sizeof *table)

static PyObject **place_of(Calls *self, size_t offset) { return (PyObject **)((char *)self + offset); }

static int Calls_traverse(Calls *self, visitproc visit, void *arg) {
    Py_VISIT(TYPE_OF(self));
    for (size_t i = 0; i < COUNT_OF(OF_GROUP); i++) Py_VISIT(*place_of(self, OF_GROUP[i]));
    for (size_t i = 0; i < COUNT_OF(OF_WORKS); i++) Py_VISIT(*place_of(self, OF_WORKS[i]));
    Py_VISIT(self->journal.journal);
    Py_VISIT(self->journal.ring);
    Py_VISIT(self->journal.objects);
    for (int i = 0; i < self->size && self->peers; i++) Py_VISIT(self->peers[i]);
    for (int i = 0; i < KNOWN + WAYS - 1; i++) {
        Py_VISIT(self->known[i].steps);
        Py_VISIT(self->known[i].op);
        Py_VISIT(self->known[i].root);
    }
    for (Handle *call = self->first; call; call = call->next) Py_VISIT(call);
    return 0;
}

static void leave_group(Calls *self) {
    while (self->first) {
        Handle *call = self->first;
        unlink_call(call);
        DROP(call);
    }
    for (int i = 0; i < self->size && self->peers; i++) Py_CLEAR(self->peers[i]);
    for (int i = 0; i < KNOWN + WAYS - 1; i++) clear_known(self->known + i);
    for (int i = 0; i < SITES; i++) Py_CLEAR(self->sites[i].code);
    journal_close(&self->journal);
    for (size_t i = 0; i < COUNT_OF(OF_GROUP); i++) Py_CLEAR(*place_of(self, OF_GROUP[i]));
}

static int Calls_clear(Calls *self) {
    leave_group(self);
    for (size_t i = 0; i < COUNT_OF(OF_WORKS); i++) Py_CLEAR(*place_of(self, OF_WORKS[i]));
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
    PyBuffer_Release(&self->armed);
    PyBuffer_Release(&self->gate);
    PyMem_Free(self->peers);
    PyMem_Free(self->scratch);
    free_object(self);
}

static PyMethodDef Calls_methods[] = {
    {"start", (PyCFunction)(void (*)(void))Calls_start, METH_FASTCALL,
     "start($self, plan, arrays, shape, result, limit, key, /)\n--\n\nStart a prepared collective."},
    {"one", (PyCFunction)(void (*)(void))Calls_one, METH_FASTCALL,
     "one($self, kind, tensor, op, root, writable, timeout, key, /)\n--\n\nStart a collective on one array."},
    {"parts", (PyCFunction)(void (*)(void))Calls_parts, METH_FASTCALL,
     "parts($self, kind, whole, other, op, timeout, key, /)\n--\n\n"
     "Start a collective on an array of equal parts; None if it is not plain."},
    {"lists", (PyCFunction)(void (*)(void))Calls_lists, METH_FASTCALL,
     "lists($self, kind, blocks, other, op, root, timeout, key, /)\n--\n\n"
     "Start a collective on a list with one array per rank; None if it is not plain."},
    {"barrier", (PyCFunction)(void (*)(void))Calls_barrier, METH_FASTCALL,
     "barrier($self, timeout, key, /)\n--\n\nStart a barrier; None if it is not plain."},
    {"block", (PyCFunction)block_of, METH_O,
     "block($self, recording, /)\n--\n\nReturn a recorder for the calls of a block."},
    {"look", (PyCFunction)Calls_look, METH_NOARGS,
     "look($self, /)\n--\n\nCheck all calls in flight, and return whether any has made progress."},
    {"hand_over", (PyCFunction)Calls_hand_over, METH_VARARGS,
     "hand_over($self, identity=0, /)\n--\n\nHand over the call with this id, or all calls, to Python."},
    {"give_up", (PyCFunction)Calls_give_up, METH_NOARGS,
     "give_up($self, /)\n--\n\nHand over the calls that wait for slots to Python."},
    {"copies", (PyCFunction)Calls_copies, METH_NOARGS,
     "copies($self, /)\n--\n\nReturn copies of the calls in flight as operations, for readers in any thread."},
    {"relink", (PyCFunction)Calls_relink, METH_NOARGS,
     "relink($self, /)\n--\n\nInvalidate cached data that depends on the links of the group."},
    {"close", (PyCFunction)Calls_close, METH_NOARGS, "close($self, /)\n--\n\nDrop the references to the group."},
    {0}};
static PyMemberDef Calls_members[] = {
    {"count", T_PYSSIZET, offsetof(Calls, count), READONLY, "Number of calls in flight."},
    {"waiting", T_PYSSIZET, offsetof(Calls, waiting), READONLY, "Number of calls in flight that wait for slots."},
    {"shift", T_UINT, offsetof(Calls, shift), 0, "Added to the id of an operation to find its slot."},
    {"watches", T_INT, offsetof(Calls, watches), 0, "True if a work that is never awaited causes a warning."},
    {"comm", T_OBJECT_EX, offsetof(Calls, comm), READONLY, "The group."},
    {0}};
static PyType_Slot Calls_slots[] = {
    {Py_tp_doc, "Calls(comm, owner, work_type, seams, folder, group, rank, size, spin, crowded, /)\n--\n\n"
                "The calls of one group that are carried out in C."},
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
