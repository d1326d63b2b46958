/* Start of collectives of one group that C code carries out.

   C code accepts only plain calls: a prepared collective of one round, free slots, no hook, no early frame, the
   group's own timeout. For any other call, `start` returns None before anything is posted, and Python carries the call
   out. If a slot still holds an earlier call of this group that its readers are about to read, the new call waits for
   the slot. If anything unusual happens to a call later (a frame instead of a post, a different call of a peer, a
   report, a failure), the call is handed over: Python creates an operation with the state of the call, and continues
   it. */
#include "accelerator.h"

#include <math.h>

/* Return whether no rank has left the group, and no data of calls that this rank has not made yet has arrived. */
int is_quiet(const Calls *calls) {
    return !PySet_Size(calls->left) && !PyDict_Size(calls->early) && !PyObject_Size(calls->asked_early);
}

static int is_plain(const Calls *calls) { return !PyList_Size(calls->hooks) && is_quiet(calls); }

static int64_t *gate_of(const Calls *calls) { return calls->gate.buf; }

Steps *steps_of(Calls *calls, PyObject *plan) {
    PyObject *steps = PyObject_GetAttr(plan, name_steps);
    if (steps == Py_None) {
        DROP(steps);
        steps = PyObject_CallFunctionObjArgs(calls->make_steps, plan, NULL);
    }
    if (steps && (TYPE_OF(steps) != Steps_type || ((Steps *)steps)->size != calls->size)) return DROP(steps), NULL;
    if (steps && ((Steps *)steps)->operands.steps && !((Steps *)steps)->loop) return DROP(steps), NULL;
    return (Steps *)steps;
}

/* Return whether one array, or a pair of arrays, has the sizes that the steps require of each buffer.

   The buffers are the same as in `buffer_bytes`: one array is the only buffer; in a pair, the first array has one part
   per rank. */
static int are_plain_arrays_right(const Calls *calls, const Steps *steps, PyArrayObject *whole, PyArrayObject *other) {
    if (steps->buffers_count > (other ? 2 * calls->size : 1)) return 0;
    npy_intp part = other ? PyArray_NBYTES(whole) / calls->size : PyArray_NBYTES(whole);
    for (int i = 0; i < steps->buffers_count; i++) {
        if (steps->needed[i] > part) return 0;
        if (i >= calls->size && steps->needed[i] && (i - calls->size + 1) * part > PyArray_NBYTES(other)) return 0;
    }
    return !other || PyArray_DESCR(other) == PyArray_DESCR(whole);
}

int are_arrays_right(const Steps *steps, PyObject *arrays) {
    if (!PyList_Check(arrays) || PyList_Size(arrays) < steps->buffers_count) return 0;
    for (int i = 0; i < steps->buffers_count; i++) {
        PyObject *array = PyList_GetItem(arrays, i);
        if (!steps->needed[i]) continue;
        if (!PyArray_Check(array) ||
            !PyArray_CHKFLAGS((PyArrayObject *)array, NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED))
            return 0;
        if (PyArray_ITEMSIZE((PyArrayObject *)array) != steps->itemsize) return 0;
        if (PyArray_NBYTES((PyArrayObject *)array) < steps->needed[i]) return 0;
    }
    for (int i = 0; i < steps->copies_count; i++) {
        PyArrayObject *target = (PyArrayObject *)PyList_GetItem(arrays, steps->copies[i].first);
        if (PyArray_NBYTES(target) != PyArray_NBYTES((PyArrayObject *)PyList_GetItem(arrays, steps->copies[i].second)))
            return 0;
    }
    return 1;
}

/* Start the timer that checks calls for timeouts and stalls, unless it is running. */
int watch(Calls *calls) {
    if (*(char *)calls->armed.buf) return 0;
    PyObject *done = PyObject_CallMethod(calls->watch, "start", NULL);
    DROP(done);
    return done ? 0 : -1;
}

/* Get the id and the count for the next call with this key. */
static int take_count(Calls *calls, PyObject *key, uint64_t *identity, int64_t *seq) {
    PyObject *pair = PyObject_CallMethod(owner_of(calls), "numbered", "O", key);
    if (!pair) return -1;
    unsigned long long id;
    long long count;
    int parsed = PyArg_ParseTuple(pair, "KL", &id, &count);
    DROP(pair);
    *identity = id;
    *seq = count;
    return parsed ? 0 : -1;
}

/* Return whether a code object is outside of this package, that is, user code; -1 with an exception. */
static int is_of_user(Calls *calls, PyObject *code) {
    Site *site = calls->sites + ((uintptr_t)code >> 5 ^ (uintptr_t)code >> 11) % SITES;
    if (site->code == code) return site->is_user;
    PyObject *file = PyObject_GetAttr(code, name_file);
    Py_ssize_t is_inside = file ? PyUnicode_Tailmatch(file, calls->folder, 0, PY_SSIZE_T_MAX, -1) : -1;
    DROP(file);
    if (is_inside < 0) return -1;
    KEEP(code);
    SET_REFERENCE(site->code, code);
    return site->is_user = !is_inside;
}

/* Attach a guard object to a work, which warns if the program never awaits the work. */
static int set_guard(Handle *call) {
    PyObject *number = call->key;
    if (number == Py_None) number = PyLong_FromLongLong(call->seq);
    else KEEP(number);
    if (number)
        call->guard =
            PyObject_CallFunction(call->calls->guard, "OOOi", call->steps->op, number, call->code, call->instruction);
    DROP(number);
    return call->guard ? 0 : -1;
}

/* Find and store the user's call site: the innermost frame outside of this package. */
int find_call_site(Calls *calls, Handle *call) {
    PyFrameObject *frame = PyEval_GetFrame();
    KEEP(frame);
    while (frame) {
        PyObject *code = (PyObject *)PyFrame_GetCode(frame), *back = NULL;
        int is_user = is_of_user(calls, code);
        if (!is_user && (back = PyObject_GetAttr((PyObject *)frame, name_back)) == Py_None) is_user = 1;
        if (is_user > 0) {
            PyObject *instruction = PyObject_GetAttr((PyObject *)frame, name_instruction);
            call->code = code;
            call->instruction = instruction ? (int)PyLong_AsLong(instruction) : 0;
            DROP(instruction);
            DROP(back);
            DROP(frame);
            if (!instruction) return -1;
            /* A call of a block needs no guard, because the end of the block awaits it. */
            return calls->watches && !call->block ? set_guard(call) : 0;
        }
        DROP(code);
        DROP(frame);
        frame = (PyFrameObject *)back;
    }
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "a call was made outside of any frame");
    return -1;
}

/* Create a call. It is not in flight yet, and nothing is posted. */
Handle *make_call(Calls *calls, Steps *steps, PyObject *arrays, PyObject *shape, PyObject *value, double limit,
                  PyObject *key) {
    Handle *call = (Handle *)calls->allocate((PyTypeObject *)calls->work_type, 0);
    if (!call) return NULL;
    KEEP(calls), call->calls = calls;
    KEEP(owner_of(calls)), call->owner = owner_of(calls);
    KEEP(steps), call->steps = steps;
    KEEP(arrays), call->arrays = arrays;
    KEEP(shape), call->shape = shape;
    KEEP(value), call->value = value;
    KEEP(key), call->key = key;
    call->limit = limit;
    call->missing = NO_PEER;
    return call;
}

/* Return whether all ranks start this call in the same order among their calls: it has no key. */
static int is_ordered(const Handle *call) { return call->block ? call->block->is_ordered : call->key == Py_None; }

/* Return whether a call may wait for its slots: calls get slots in the order that is the same on all ranks. */
static int may_wait(const Handle *call) { return is_ordered(call) && !call->calls->gave_up; }

/* Return CAN if a call can be posted, IN_USE if it must wait for a slot, else CANNOT; -1 with an exception. After
   CAN, no Python function has run since the checks, and a call without a key has the next sequence number. */
int is_ready(Handle *call) {
    Calls *calls = call->calls;
    const Steps *steps = call->steps;
    for (int tries = 0; tries < TRIES; tries++) {
        uint64_t asked = calls->asked;
        if (!calls->comm || gate_of(calls)[BARRED]) return CANNOT;
        if (!call->is_in_flight && is_ordered(call)) {
            int is_next = call->block || call->seq == gate_of(calls)[ENTERED] + 1;
            if (!is_next) return CANNOT; /* a finalizer has made a call of this group */
            if (calls->waiting) return IN_USE;
        }
        int postable = call->relay ? relay_is_startable(call)
                                   : are_postable(calls, steps->first, steps->first_count, call->identity);
        if (postable == IN_USE) return may_wait(call) ? IN_USE : CANNOT;
        for (int i = 0; i < steps->takes_count && postable == CAN; i++) {
            const Take *take = steps->takes + i;
            PeerLanes *peer = peer_of(calls, take->peer);
            if (!peer) return PyErr_Occurred() ? -1 : CANNOT;
            const Slots *slots = take->is_common ? &peer->common_slots : &peer->lane_slots;
            if (take->nbytes > INLINE_NBYTES && take->nbytes > slot_nbytes(slots, take->first_slot)) return CANNOT;
        }
        if (postable <= 0 || calls->asked == asked) return postable;
    }
    return CANNOT;
}

/* Handle a call that waits for a slot: Python checks for free slots in every loop iteration. Advance the oldest
   calls, because the readers of the slot may be waiting until this rank reads their posts. */
static int wait_for_slots(Calls *calls) {
    if (calls->waiting == 1) {
        PyObject *done = PyObject_CallNoArgs(calls->wait);
        DROP(done);
        if (!done) return crash(calls);
    }
    return advance(calls);
}

/* Start a call with the result `ready` of `is_ready`. The call may end at once, or be handed over to Python. */
int launch(Handle *call, int ready) {
    call->entered = seconds();
    call->is_posted = ready == CAN;
    link_call(call);
    if (ready != CAN) return wait_for_slots(call->calls);
    call->calls->gave_up = 0;
    return begin(call);
}

/* Create and start a call with prepared steps. Return NULL without an exception if Python must carry out the call;
   then nothing is posted, and for a call with a key, `taken` contains the id and the count that it got. */
Handle *start(Calls *calls, Steps *steps, PyObject *arrays, PyObject *shape, PyObject *value, double limit,
              PyObject *key, PyObject **taken) {
    if (watch(calls) < 0) return NULL;
    Handle *call = make_call(calls, steps, arrays, shape, value, limit, key);
    if (!call) return NULL;
    /* Compute the next sequence number, which determines the slots, but assign it only if the call starts. */
    int failed = 0;
    if (key == Py_None) call->identity = (uint64_t)(call->seq = gate_of(calls)[ENTERED] + 1);
    else failed = take_count(calls, key, &call->identity, &call->seq);
    if (!failed && steps->chunk) failed = relay_open(call);
    int ready = failed || find_call_site(calls, call) < 0 ? -1 : is_ready(call);
    if (!ready && key != Py_None)
        *taken = Py_BuildValue("KL", (unsigned long long)call->identity, (long long)call->seq);
    if (!ready && note_await(call) < 0) ready = -1; /* this work is discarded, so its guard must not warn */
    if (ready <= 0) {
        DROP(call);
        return NULL;
    }
    if (key == Py_None) gate_of(calls)[ENTERED] = call->seq;
    if (launch(call, ready) < 0) {
        DROP(call);
        return NULL;
    }
    return call;
}

/* start(plan, arrays, shape, result, limit, key): start a call and return its work. If Python must carry out the
   call, return None, or the id and the count if a call with a key has got these already. */
PyObject *Calls_start(Calls *calls, PyObject *const *args, Py_ssize_t count) {
    if (count != 6) return PyErr_SetString(PyExc_TypeError, "start takes 6 arguments"), NULL;
    if (!calls->comm) Py_RETURN_NONE;
    double limit = PyFloat_AsDouble(args[4]);
    if (limit == -1.0 && PyErr_Occurred()) return NULL;
    PyObject *taken = NULL;
    Handle *call = NULL;
    if (is_plain(calls)) {
        Steps *steps = steps_of(calls, args[0]);
        if (steps && are_arrays_right(steps, args[1]))
            call = start(calls, steps, args[1], args[2], args[3], limit, args[5], &taken);
        DROP(steps);
    }
    if (call || PyErr_Occurred()) return (PyObject *)call;
    if (taken) return taken;
    Py_RETURN_NONE;
}

/* ---- calls on plain arrays, made by the group's methods */

enum { LISTED = 16 }; /* maximum number of ranks for calls on lists */

static int is_carray(PyObject *array) {
    return TYPE_OF(array) == &PyArray_Type &&
           (PyArray_FLAGS((PyArrayObject *)array) & NPY_ARRAY_CARRAY) == NPY_ARRAY_CARRAY &&
           PyArray_NDIM((PyArrayObject *)array) <= DIMENSIONS;
}

/* Return the first of the WAYS entries in the call cache that may hold an equal call. */
static Known *known_at(Calls *calls, const Asked *asked) {
    PyArrayObject *arrays[] = {(PyArrayObject *)asked->array, (PyArrayObject *)asked->other};
    uint64_t hash = (uintptr_t)asked->kind ^ (uintptr_t)asked->op >> 5 ^ (uintptr_t)asked->root >> 3;
    for (int i = 0; i < 2 && arrays[i]; i++) {
        hash ^= (uintptr_t)PyArray_DESCR(arrays[i]) >> 4;
        for (int n = 0; n < PyArray_NDIM(arrays[i]); n++) hash = hash * 1000003 ^ (uintptr_t)PyArray_DIM(arrays[i], n);
    }
    return calls->known + (hash * 0x9e3779b97f4a7c15u >> 32) % KNOWN; /* Fibonacci hashing */
}

static int has_shape(PyArrayObject *array, const npy_intp *shape, int dimensions) {
    if (PyArray_NDIM(array) != dimensions) return 0;
    for (int i = 0; i < dimensions; i++)
        if (PyArray_DIM(array, i) != shape[i]) return 0;
    return 1;
}

static int copy_shape(PyArrayObject *array, npy_intp *shape) {
    for (int i = 0; i < PyArray_NDIM(array); i++) shape[i] = PyArray_DIM(array, i);
    return PyArray_NDIM(array);
}

static int is_like(const Known *known, const Asked *asked) {
    if (!known->steps || known->form != asked->form || known->kind != asked->kind || known->op != asked->op ||
        known->root != asked->root || known->has_blocks != (asked->blocks && asked->blocks != Py_None))
        return 0;
    PyArrayObject *first = (PyArrayObject *)asked->array, *second = (PyArrayObject *)asked->other;
    if (first && (PyArray_DESCR(first) != known->dtype || !has_shape(first, known->shape, known->dimensions))) return 0;
    return !second || (PyArray_DESCR(second) == known->dtype &&
                       has_shape(second, known->shape + DIMENSIONS, known->other_dimensions));
}

void clear_known(Known *known) {
    Py_CLEAR(known->kind);
    Py_CLEAR(known->op);
    Py_CLEAR(known->root);
    Py_CLEAR(known->dtype);
    Py_CLEAR(known->main_shape);
    Py_CLEAR(known->steps);
}

/* Return the shape of a call's main array; for an array with one part per rank, the shape of one part. */
static PyObject *main_shape_of(const Calls *calls, const Known *known, const Asked *asked) {
    if (!asked->array) return PyTuple_New(0);
    if (!asked->other) return PyObject_GetAttr(asked->array, name_shape);
    if (known->gives_whole) return PyObject_GetAttr(asked->other, name_shape);
    return Py_BuildValue("(n)", (Py_ssize_t)(PyArray_SIZE((PyArrayObject *)asked->array) / calls->size));
}

static PyObject *plan_of(Calls *calls, const Asked *asked) {
    switch (asked->form) {
    case NOTHING:
        return PyObject_CallNoArgs(calls->find_barrier);
    case ONE:
        return PyObject_CallFunctionObjArgs(calls->find_one, asked->kind, asked->array, asked->op, asked->root, NULL);
    case PARTS:
        return PyObject_CallFunctionObjArgs(calls->find_parts, asked->kind, asked->array, asked->other, asked->op,
                                            NULL);
    default:
        return PyObject_CallFunctionObjArgs(calls->find_lists, asked->kind, asked->blocks, asked->others, asked->op,
                                            asked->root, NULL);
    }
}

/* Return whether the arrays of a call have the sizes that its steps require. */
static int are_right(const Calls *calls, const Steps *steps, const Asked *asked, PyObject *arrays) {
    if (asked->array && steps->storage != PyArray_DESCR((PyArrayObject *)asked->array)) return 0;
    if (PyList_Check(arrays)) return are_arrays_right(steps, arrays);
    return are_plain_arrays_right(calls, steps, (PyArrayObject *)asked->array, (PyArrayObject *)asked->other);
}

/* Find an earlier equal call in the cache, or add this call. The caller releases `made`, which holds an entry that
   is not cached. Return NULL without an exception if C code cannot carry out the call. */
static Known *find_known(Calls *calls, const Asked *asked, PyObject *arrays, Known *made) {
    Known *known = known_at(calls, asked);
    for (int i = 0; i < WAYS; i++)
        if (is_like(known + i, asked)) return known + i;
    PyObject *plan = plan_of(calls, asked);
    if (!plan || plan == Py_None) {
        DROP(plan);
        return NULL;
    }
    Steps *steps = steps_of(calls, plan);
    DROP(plan);
    if (!steps || !are_right(calls, steps, asked, arrays)) {
        DROP(steps);
        return NULL;
    }
    PyArrayObject *first = (PyArrayObject *)asked->array, *second = (PyArrayObject *)asked->other;
    *made = (Known){asked->form, .kind = asked->kind, .op = asked->op, .root = asked->root, .steps = steps};
    made->has_blocks = asked->blocks && asked->blocks != Py_None;
    KEEP(made->kind), KEEP(made->op), KEEP(made->root);
    if (first) {
        KEEP(PyArray_DESCR(first)), made->dtype = PyArray_DESCR(first);
        made->dimensions = copy_shape(first, made->shape);
    }
    if (second) made->other_dimensions = copy_shape(second, made->shape + DIMENSIONS);
    int is_alltoall = !PyUnicode_CompareWithASCIIString(made->kind, "alltoall");
    made->gives_whole = !PyUnicode_CompareWithASCIIString(made->kind, "allgather") ||
                        !PyUnicode_CompareWithASCIIString(made->kind, "gather");
    made->gives_list = asked->form == LISTS && (made->gives_whole || is_alltoall);
    if (!(made->main_shape = main_shape_of(calls, made, asked))) return NULL;
    /* Do not cache a root that is not an int, because its value may be another one next time. */
    if (made->root != Py_None && !PyLong_CheckExact(made->root)) return made;
    int place = 0;
    while (place < WAYS - 1 && known[place].steps) place++;
    Known old = known[place];
    memmove(known + 1, known, place * sizeof *known); /* make room for the new entry; the oldest is last */
    known[0] = *made;
    *made = old; /* the caller releases the replaced entry */
    return known;
}

/* Find the timeout of a call in seconds. Return 0 if Python must handle the call, for example because its timeout is
   too short: the timer reads a call's own timeout only when it hands the call over. */
static int find_limit(Calls *calls, PyObject *given, double *limit) {
    PyObject *timeout = PyObject_GetAttr(calls->comm, name_default_timeout);
    if (!timeout) return -1;
    if (timeout != calls->timeout) {
        calls->limit = PyFloat_AsDouble(timeout);
        KEEP(timeout);
        SET_REFERENCE(calls->timeout, timeout);
    }
    DROP(timeout);
    if (calls->limit == -1.0 && PyErr_Occurred()) return -1;
    *limit = calls->limit;
    if (given == Py_None) return !isnan(*limit);
    if (!PyFloat_CheckExact(given) && !PyLong_CheckExact(given)) return 0;
    PyObject *least = PyObject_GetAttr(calls->watch, name_least_timeout);
    double shortest = least ? PyFloat_AsDouble(least) : -1.0;
    DROP(least);
    if (shortest == -1.0 && PyErr_Occurred()) return -1;
    *limit = PyFloat_AsDouble(given);
    if (*limit == -1.0 && PyErr_Occurred()) PyErr_Clear(); /* the number is too large for a double */
    return *limit >= shortest;
}

/* Return whether a call may start now in C: in the right thread and loop, with an open group, and without an
   interceptor except a `block` that records the call. */
static int may_start(Calls *calls, PyObject *timeout, double *limit, Block **block) {
    if (PyThread_get_thread_ident() != calls->thread || calls->forks != forks_of_process) return 0;
    PyObject *running = PyObject_CallNoArgs(calls->is_running);
    DROP(running);
    if (running != Py_True) return running ? 0 : -1;
    if (gate_of(calls)[DIVERTS] && (gate_of(calls)[BARRED] || !(*block = block_here(calls)))) return 0;
    int found = find_limit(calls, timeout, limit);
    return found <= 0 || *block ? found : is_plain(calls);
}

static int share_memory(PyArrayObject *first, PyArrayObject *second) {
    char *a = PyArray_BYTES(first), *b = PyArray_BYTES(second);
    return a < b + PyArray_NBYTES(second) && b < a + PyArray_NBYTES(first);
}

/* Return the object that becomes the result of a call. A list is a new one, except the caller's list of outputs of
   an allgather. */
static PyObject *result_of(const Known *known, const Asked *asked) {
    PyObject *given = asked->form == NOTHING                                               ? Py_None
                      : asked->form == ONE || (asked->form == PARTS && known->gives_whole) ? asked->array
                      : asked->form == PARTS                                               ? asked->other
                      : known->gives_whole                                                 ? asked->blocks
                                                                                           : asked->others;
    int is_same =
        given == Py_None || !known->gives_list || (known->root == Py_None && known->gives_whole && PyList_Check(given));
    if (!is_same) return PySequence_List(given);
    KEEP(given);
    return given;
}

/* Start a call on plain arrays, or record it in a block. `arrays` has the form of `Handle.arrays`. Return NULL
   without an exception if the call is not plain. */
static Handle *start_plain(Calls *calls, const Asked *asked, PyObject *arrays, PyObject *timeout) {
    double limit;
    Block *block = NULL;
    int may = arrays ? may_start(calls, timeout, &limit, &block) : 0;
    Known made = {0}, *known = may > 0 ? find_known(calls, asked, arrays, &made) : NULL;
    Handle *call = NULL;
    if (known) {
        Steps *steps = known->steps;
        PyObject *shape = known->main_shape, *result = result_of(known, asked);
        KEEP(steps), KEEP(shape); /* keep references: Python code may run, and replace the cache entry */
        if (result && block) call = record(block, steps, arrays, shape, result, limit);
        else if (result) call = start(calls, steps, arrays, shape, result, limit, Py_None, NULL);
        DROP(result), DROP(steps), DROP(shape);
    }
    clear_known(&made);
    DROP(block);
    return call;
}

/* one(kind, tensor, op, root, writable, timeout, key): start a call on one array. If the call is not plain, call
   `Dispatcher.one` with the same arguments. */
PyObject *Calls_one(Calls *calls, PyObject *const *args, Py_ssize_t count) {
    if (count != 7) return PyErr_SetString(PyExc_TypeError, "one takes 7 arguments"), NULL;
    if (calls->comm && args[6] == Py_None && is_carray(args[1])) {
        Asked asked = {ONE, args[0], args[2], args[3], args[1], NULL, NULL, NULL};
        Handle *call = start_plain(calls, &asked, args[1], args[5]);
        if (call || PyErr_Occurred()) return (PyObject *)call;
    }
    if (!calls->owner) return PyErr_SetString(PyExc_RuntimeError, "these calls were not initialized"), NULL;
    PyObject *arguments = PyTuple_New(count), *work;
    for (Py_ssize_t i = 0; arguments && i < count; i++) KEEP(args[i]), PyTuple_SetItem(arguments, i, args[i]);
    PyObject *function = arguments ? PyObject_GetAttrString(owner_of(calls), "one") : NULL;
    work = function ? PyObject_Call(function, arguments, NULL) : NULL;
    DROP(function);
    DROP(arguments);
    return work;
}

/* parts(kind, whole, other, op, timeout, key): start a call on two arrays: `whole` has one part per rank, `other`
   has one part or as many. Return None if the call is not plain. */
PyObject *Calls_parts(Calls *calls, PyObject *const *args, Py_ssize_t count) {
    if (count != 6) return PyErr_SetString(PyExc_TypeError, "parts takes 6 arguments"), NULL;
    PyObject *whole = args[1], *other = args[2];
    if (calls->comm && args[5] == Py_None && is_carray(whole) && is_carray(other) &&
        !share_memory((PyArrayObject *)whole, (PyArrayObject *)other)) {
        Asked asked = {PARTS, args[0], args[3], Py_None, whole, other, NULL, NULL};
        PyObject *pair = PyTuple_Pack(2, whole, other);
        Handle *call = start_plain(calls, &asked, pair, args[4]);
        DROP(pair);
        if (call || PyErr_Occurred()) return (PyObject *)call;
    }
    Py_RETURN_NONE;
}

/* barrier(timeout, key): start a barrier; return None if the call is not plain. */
PyObject *Calls_barrier(Calls *calls, PyObject *const *args, Py_ssize_t count) {
    if (count != 2) return PyErr_SetString(PyExc_TypeError, "barrier takes 2 arguments"), NULL;
    if (calls->comm && args[1] == Py_None) {
        Asked asked = {NOTHING, name_barrier, Py_None, Py_None, NULL, NULL, NULL, NULL};
        PyObject *arrays = PyList_New(0);
        Handle *call = start_plain(calls, &asked, arrays, args[0]);
        DROP(arrays);
        if (call || PyErr_Occurred()) return (PyObject *)call;
    }
    Py_RETURN_NONE;
}

/* ---- calls on lists with one array per rank */

static Py_ssize_t length_of(PyObject *list) {
    return PyList_CheckExact(list) ? PyList_Size(list) : PyTuple_CheckExact(list) ? PyTuple_Size(list) : -1;
}

static PyObject *item_of(PyObject *list, Py_ssize_t index) {
    return PyList_CheckExact(list) ? PyList_GetItem(list, index) : PyTuple_GetItem(list, index);
}

/* Return whether any output array, with an index from `start` to `end`, shares memory with another array. */
static int overlap(PyObject *arrays, Py_ssize_t start, Py_ssize_t end) {
    for (Py_ssize_t i = start; i < end; i++)
        for (Py_ssize_t n = 0; n < PyList_Size(arrays); n++) {
            PyObject *one = PyList_GetItem(arrays, i), *other = PyList_GetItem(arrays, n);
            if (n != i && other != Py_None && share_memory((PyArrayObject *)one, (PyArrayObject *)other)) return 1;
        }
    return 0;
}

/* Return all arrays of a call on lists, in the order of the buffers. Return NULL without an exception if the arrays
   are not plain, differ in dtype or shape, or are too many for a quick comparison. */
static PyObject *arrays_of(const Calls *calls, Asked *asked) {
    Py_ssize_t blocks = asked->blocks == Py_None ? 0 : length_of(asked->blocks), others = length_of(asked->others);
    int is_one = others < 0;
    if (blocks < 0 || (blocks && blocks != calls->size) || (!is_one && others != calls->size) || calls->size > LISTED)
        return NULL;
    asked->array = is_one ? asked->others : item_of(asked->others, 0);
    if (!is_carray(asked->array)) return NULL;
    PyArrayObject *first = (PyArrayObject *)asked->array;
    Py_ssize_t count = calls->size + (is_one ? 1 : others);
    PyObject *arrays = PyList_New(count);
    for (Py_ssize_t i = 0; arrays && i < count; i++) {
        PyObject *each = i >= calls->size ? (is_one ? asked->others : item_of(asked->others, i - calls->size))
                         : blocks         ? item_of(asked->blocks, i)
                                          : Py_None;
        int is_right = each == Py_None
                           ? !blocks && i < calls->size
                           : is_carray(each) && PyArray_DESCR((PyArrayObject *)each) == PyArray_DESCR(first) &&
                                 has_shape((PyArrayObject *)each, PyArray_DIMS(first), PyArray_NDIM(first));
        if (!is_right) return DROP(arrays), NULL;
        KEEP(each), PyList_SetItem(arrays, i, each);
    }
    return arrays;
}

/* lists(kind, blocks, other, op, root, timeout, key): start a call on `blocks` (a list with one array per rank, or
   None) and `other` (an array or a list). Return None if the call is not plain. */
PyObject *Calls_lists(Calls *calls, PyObject *const *args, Py_ssize_t count) {
    if (count != 7) return PyErr_SetString(PyExc_TypeError, "lists takes 7 arguments"), NULL;
    Asked asked = {LISTS, args[0], args[3], args[4], NULL, NULL, args[1], args[2]};
    PyObject *arrays = calls->comm && args[6] == Py_None ? arrays_of(calls, &asked) : NULL;
    if (arrays) {
        int gathers = !PyUnicode_CompareWithASCIIString(asked.kind, "gather") ||
                      !PyUnicode_CompareWithASCIIString(asked.kind, "allgather");
        int clashes = gathers ? args[1] != Py_None && overlap(arrays, 0, calls->size)
                              : overlap(arrays, calls->size, PyList_Size(arrays));
        Handle *call = clashes ? NULL : start_plain(calls, &asked, arrays, args[5]);
        DROP(arrays);
        if (call) return (PyObject *)call;
    }
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}
