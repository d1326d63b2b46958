/* Calls: collectives of one group that are carried out here, from the call to the end.

   A call is taken only if everything is plain: a prepared collective of one round, free slots, no hook, no early frame,
   the group's own timeout. Otherwise `start` returns None before anything was posted, and Python goes on. Only where a
   slot still has an earlier call of this group, which its readers are about to read, the call waits for it. Whatever
   happens to a call later that is not plain (a frame instead of a post, another call of a peer, a report, a failure)
   hands it over: Python gets an operation that has posted, and carries on from there. */
#include "accelerator.h"

#include <math.h>

static int is_plain(Calls *calls) {
    if (PySet_Size(calls->left) || PyDict_Size(calls->early) || PyObject_Size(calls->asked_early)) return 0;
    PyObject *active = PyObject_GetAttr(calls->hooks, name_active);
    int is_active = active ? PyObject_IsTrue(active) : -1;
    DROP(active);
    return is_active < 0 ? -1 : !is_active;
}

static Steps *steps_of(Calls *calls, PyObject *plan) {
    PyObject *steps = PyObject_GetAttr(plan, name_steps);
    if (steps == Py_None) {
        DROP(steps);
        steps = PyObject_CallFunctionObjArgs(calls->make_steps, plan, NULL);
    }
    if (steps && (TYPE_OF(steps) != Steps_type || ((Steps *)steps)->size != calls->size)) return DROP(steps), NULL;
    return (Steps *)steps;
}

/* Whether arrays have what the steps need of each buffer, as `buffer_bytes` finds them: an array that is the only
   buffer, or an array of as many parts as there are ranks, and another one. */
static int are_plain_arrays_right(const Calls *calls, const Steps *steps, PyArrayObject *whole, PyArrayObject *other) {
    if (steps->buffers_count > (other ? 2 * calls->size : 1)) return 0;
    npy_intp part = other ? PyArray_NBYTES(whole) / calls->size : PyArray_NBYTES(whole);
    for (int i = 0; i < steps->buffers_count; i++) {
        if (steps->needed[i] > part) return 0;
        if (i >= calls->size && steps->needed[i] && (i - calls->size + 1) * part > PyArray_NBYTES(other)) return 0;
    }
    return !other || PyArray_DESCR(other) == PyArray_DESCR(whole);
}

static int are_arrays_right(const Steps *steps, PyObject *arrays) {
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

/* Start the timer that looks at calls that take long, if it does not run. */
int watch(Calls *calls) {
    PyObject *timer = PyObject_GetAttr(calls->watch, name_timer);
    if (!timer) return -1;
    int runs = timer != Py_None;
    DROP(timer);
    if (runs) return 0;
    PyObject *done = PyObject_CallMethod(calls->watch, "start", NULL);
    if (!done) return -1;
    DROP(done);
    return 0;
}

/* Return the id of the next call without a key, which is its number. */
static int next_number(Calls *calls, uint64_t *identity, int64_t *seq) {
    PyObject *entered = PyObject_GetAttr(calls->comm, name_entered);
    if (!entered) return -1;
    long long number = PyLong_AsLongLong(entered);
    DROP(entered);
    if (number == -1 && PyErr_Occurred()) return -1;
    *seq = number + 1;
    *identity = (uint64_t)*seq;
    return 0;
}

static int take_number(Calls *calls, int64_t seq) {
    PyObject *entered = PyLong_FromLongLong(seq);
    int failed = !entered || PyObject_SetAttr(calls->comm, name_entered, entered) < 0;
    DROP(entered);
    return failed ? -1 : 0;
}

/* Take the next count of a key. */
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

/* Find where the user makes the call: the first frame outside of the package. */
static int find_call_site(Calls *calls, Handle *call) {
    PyObject *frame = (PyObject *)PyEval_GetFrame();
    KEEP(frame);
    while (frame) {
        PyObject *code = PyObject_GetAttr(frame, name_code), *file = code ? PyObject_GetAttr(code, name_file) : NULL,
                 *back = NULL;
        if (!file) {
            DROP(code);
            break;
        }
        int is_user = file == calls->last_file;
        if (!is_user) is_user = PyUnicode_Tailmatch(file, calls->folder, 0, PY_SSIZE_T_MAX, -1) == 0;
        if (!is_user && (back = PyObject_GetAttr(frame, name_back)) == Py_None) is_user = 1;
        if (is_user) {
            PyObject *instruction = PyObject_GetAttr(frame, name_instruction);
            call->code = code;
            call->instruction = instruction ? (int)PyLong_AsLong(instruction) : 0;
            SET_REFERENCE(calls->last_file, file);
            DROP(instruction);
            DROP(back);
            DROP(frame);
            if (!instruction) return -1;
            if (!calls->watches) return 0;
            PyObject *number = call->key == Py_None ? PyLong_FromLongLong(call->seq) : (KEEP(call->key), call->key);
            call->guard =
                number ? PyObject_CallFunction(calls->guard, "OOOi", call->steps->op, number, code, call->instruction)
                       : NULL;
            DROP(number);
            return call->guard ? 0 : -1;
        }
        DROP(file);
        DROP(code);
        DROP(frame);
        frame = back;
    }
    DROP(frame);
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "a call was made from no frame");
    return -1;
}

static npy_intp buffer_nbytes(PyObject *arrays, int buffer, int size) {
    if (PyList_Check(arrays)) return PyArray_NBYTES((PyArrayObject *)PyList_GetItem(arrays, buffer));
    if (!PyTuple_Check(arrays)) return PyArray_NBYTES((PyArrayObject *)arrays);
    return PyArray_NBYTES((PyArrayObject *)PyTuple_GetItem(arrays, 0)) / size;
}

/* Make a call; nothing is posted yet. */
static Handle *make_call(Calls *calls, Steps *steps, PyObject *arrays, PyObject *shape, PyObject *value, double limit,
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

/* Whether the slots of a call may be free soon: the order of the calls says which one waits. */
static int may_wait(const Handle *call) { return call->key == Py_None && !call->calls->gave_up; }

/* Whether a call can be posted, or waits for a slot: no function of Python has run since that was found out. Its number
   is its own then; without a key, it is the next one. -1: an exception. */
int is_ready(Handle *call) {
    Calls *calls = call->calls;
    const Steps *steps = call->steps;
    for (int tries = 0; tries < TRIES; tries++) {
        uint64_t asked = calls->asked, identity;
        int64_t seq;
        int is_barred = calls->comm ? is_true(calls->comm, name_barred) : 1;
        if (is_barred) return is_barred < 0 ? -1 : CANNOT;
        if (call->key == Py_None && !call->is_in_flight) {
            if (next_number(calls, &identity, &seq) < 0) return -1;
            if (seq != call->seq) return CANNOT; /* a finalizer has made a call */
            if (calls->waiting) return IN_USE;
        }
        int postable = are_postable(calls, steps->first, steps->first_count, call->identity);
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

/* A call waits for a slot: Python looks in every turn of the loop whether there is one. The readers of a slot may wait
   in turn for this rank to read what they have posted. */
static int wait_for_slots(Calls *calls) {
    if (calls->waiting == 1) {
        PyObject *done = PyObject_CallNoArgs(calls->wait);
        DROP(done);
        if (!done) return crash(calls);
    }
    return advance(calls);
}

/* Start a call with prepared steps: NULL without an exception if Python has to carry it out, before anything was
   posted. The count of a key is taken then, as `taken` has it. */
Handle *start(Calls *calls, Steps *steps, PyObject *arrays, PyObject *shape, PyObject *value, double limit,
              PyObject *key, PyObject **taken) {
    if (watch(calls) < 0) return NULL;
    Handle *call = make_call(calls, steps, arrays, shape, value, limit, key);
    if (!call) return NULL;
    /* The slots follow from the number, which is taken only if they are free. */
    int failed = key == Py_None ? next_number(calls, &call->identity, &call->seq)
                                : take_count(calls, key, &call->identity, &call->seq);
    int ready = failed || find_call_site(calls, call) < 0 ? -1 : is_ready(call);
    if (!ready && key != Py_None)
        *taken = Py_BuildValue("KL", (unsigned long long)call->identity, (long long)call->seq);
    if (!ready && note_await(call) < 0) ready = -1; /* nobody gets this work */
    if (ready <= 0 || (key == Py_None && take_number(calls, call->seq) < 0)) {
        DROP(call);
        return NULL;
    }
    call->entered = seconds();
    for (int i = 0; i < steps->copies_count; i++)
        memmove(buffer_bytes(call, steps->copies[i].first), buffer_bytes(call, steps->copies[i].second),
                buffer_nbytes(arrays, steps->copies[i].first, calls->size));
    call->is_posted = ready == CAN;
    link_call(call);
    if (ready == CAN) {
        calls->gave_up = 0;
        failed = begin(call);
    } else {
        failed = wait_for_slots(calls);
    }
    if (failed) {
        DROP(call);
        return NULL;
    }
    return call;
}

/* start(plan, arrays, shape, result, limit, key): return a work; None if Python has to carry it out, or, since the
   count of its key is taken, the id and the count. */
PyObject *Calls_start(Calls *calls, PyObject *const *args, Py_ssize_t count) {
    if (count != 6) return PyErr_SetString(PyExc_TypeError, "start takes 6 arguments"), NULL;
    if (!calls->comm) Py_RETURN_NONE;
    double limit = PyFloat_AsDouble(args[4]);
    if (limit == -1.0 && PyErr_Occurred()) return NULL;
    int plain = calls->comm ? is_plain(calls) : 0;
    if (plain < 0) return NULL;
    PyObject *taken = NULL;
    Handle *call = NULL;
    if (plain) {
        Steps *steps = steps_of(calls, args[0]);
        if (steps && are_arrays_right(steps, args[1]))
            call = start(calls, steps, args[1], args[2], args[3], limit, args[5], &taken);
        DROP(steps);
    }
    if (call || PyErr_Occurred()) return (PyObject *)call;
    if (taken) return taken;
    Py_RETURN_NONE;
}

/* ---- calls on plain arrays, from the group's methods */

static int is_carray(PyObject *array) {
    return TYPE_OF(array) == &PyArray_Type &&
           (PyArray_FLAGS((PyArrayObject *)array) & NPY_ARRAY_CARRAY) == NPY_ARRAY_CARRAY &&
           PyArray_NDIM((PyArrayObject *)array) <= DIMENSIONS;
}

static Known *known_at(Calls *calls, PyObject *kind, PyObject *op, PyObject *root, PyArrayObject *array,
                       PyArrayObject *other) {
    uintptr_t hash = (uintptr_t)kind ^ (uintptr_t)PyArray_DESCR(array) >> 4 ^ (uintptr_t)op >> 5 ^ (uintptr_t)root >> 3;
    for (int i = 0; i < PyArray_NDIM(array); i++) hash = hash * 1000003 ^ (uintptr_t)PyArray_DIM(array, i);
    if (other)
        for (int i = 0; i < PyArray_NDIM(other); i++) hash = hash * 1000003 ^ (uintptr_t)PyArray_DIM(other, i);
    return calls->known + (hash ^ hash >> 17 ^ hash >> 7) % KNOWN;
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

static int is_like(const Known *known, PyObject *kind, PyObject *op, PyObject *root, PyArrayObject *array,
                   PyArrayObject *other) {
    if (!known->steps || known->kind != kind || known->op != op || known->root != root ||
        known->dtype != PyArray_DESCR(array))
        return 0;
    if (!has_shape(array, known->shape, known->dimensions)) return 0;
    if (!other) return known->other_dimensions < 0;
    return PyArray_DESCR(other) == known->dtype && has_shape(other, known->shape + DIMENSIONS, known->other_dimensions);
}

void forget(Known *known) {
    Py_CLEAR(known->kind);
    Py_CLEAR(known->op);
    Py_CLEAR(known->root);
    Py_CLEAR(known->dtype);
    Py_CLEAR(known->steps);
}

/* Return the steps of a call: NULL, without an exception, if there are none. */
static Steps *find_steps(Calls *calls, PyObject *kind, PyObject *op, PyObject *root, PyObject *array, PyObject *other) {
    PyArrayObject *first = (PyArrayObject *)array, *second = (PyArrayObject *)other;
    Known *known = known_at(calls, kind, op, root, first, second);
    if (is_like(known, kind, op, root, first, second)) return KEEP(known->steps), known->steps;
    PyObject *plan = other ? PyObject_CallFunctionObjArgs(calls->find_parts, kind, array, other, op, NULL)
                           : PyObject_CallFunctionObjArgs(calls->find_one, kind, array, op, root, NULL);
    if (!plan || plan == Py_None) {
        DROP(plan);
        return NULL;
    }
    Steps *steps = steps_of(calls, plan);
    DROP(plan);
    if (!steps || steps->storage != PyArray_DESCR(first) || !are_plain_arrays_right(calls, steps, first, second)) {
        DROP(steps);
        return NULL;
    }
    /* A root of another type may have another number the next time. */
    if (root != Py_None && !PyLong_CheckExact(root)) return steps;
    Known made = {kind, op, root, PyArray_DESCR(first), .other_dimensions = -1, .steps = steps};
    made.dimensions = copy_shape(first, made.shape);
    if (other) made.other_dimensions = copy_shape(second, made.shape + DIMENSIONS);
    KEEP(kind), KEEP(op), KEEP(root), KEEP(made.dtype), KEEP(steps);
    Known old = *known;
    *known = made;
    forget(&old);
    return steps;
}

/* Find how many seconds a call may take: 0 if that is for Python. The timer finds calls that have a timeout of their
   own only when it hands them over, so that is not a short one. */
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
    if (*limit == -1.0 && PyErr_Occurred()) PyErr_Clear(); /* a number that is too large */
    return *limit >= shortest;
}

/* Whether a call made here and now is plain: this thread and loop, no interceptor, an open group. */
static int may_start(Calls *calls, PyObject *timeout, double *limit) {
    if (PyThread_get_thread_ident() != calls->thread || calls->forks != forks_of_process) return 0;
    PyObject *running = PyObject_CallNoArgs(calls->is_running);
    DROP(running);
    if (running != Py_True) return running ? 0 : -1;
    int found = is_true(owner_of(calls), name_diverts);
    if (found) return found < 0 ? -1 : 0;
    found = find_limit(calls, timeout, limit);
    return found <= 0 ? found : is_plain(calls);
}

static int share_memory(PyArrayObject *first, PyArrayObject *second) {
    char *a = PyArray_BYTES(first), *b = PyArray_BYTES(second);
    return a < b + PyArray_NBYTES(second) && b < a + PyArray_NBYTES(first);
}

/* one(kind, tensor, op, root, writable, timeout, key): as `Dispatcher.one`, which gets what is not plain. */
PyObject *Calls_one(Calls *calls, PyObject *const *args, Py_ssize_t count) {
    if (count != 7) return PyErr_SetString(PyExc_TypeError, "one takes 7 arguments"), NULL;
    if (calls->comm && args[6] == Py_None && is_carray(args[1])) {
        double limit;
        int may = may_start(calls, args[5], &limit);
        if (may < 0) return NULL;
        Steps *steps = may ? find_steps(calls, args[0], args[2], args[3], args[1], NULL) : NULL;
        if (!steps && PyErr_Occurred()) return NULL;
        PyObject *shape = steps ? PyObject_GetAttr(args[1], name_shape) : NULL;
        PyObject *work = shape ? (PyObject *)start(calls, steps, args[1], shape, args[1], limit, Py_None, NULL) : NULL;
        DROP(shape);
        DROP(steps);
        if (work || PyErr_Occurred()) return work;
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

/* parts(kind, whole, other, op, shape, result, timeout, key): start a call on an array of equal parts, and one of a
   part or as many; None if it is not plain. */
PyObject *Calls_parts(Calls *calls, PyObject *const *args, Py_ssize_t count) {
    if (count != 8) return PyErr_SetString(PyExc_TypeError, "parts takes 8 arguments"), NULL;
    PyObject *whole = args[1], *other = args[2];
    double limit;
    if (!calls->comm || args[7] != Py_None || !is_carray(whole) || !is_carray(other)) Py_RETURN_NONE;
    if (share_memory((PyArrayObject *)whole, (PyArrayObject *)other)) Py_RETURN_NONE;
    int may = may_start(calls, args[6], &limit);
    if (may < 0) return NULL;
    Steps *steps = may ? find_steps(calls, args[0], args[3], Py_None, whole, other) : NULL;
    if (steps) {
        PyObject *pair = PyTuple_Pack(2, whole, other), *work = NULL;
        if (pair) work = (PyObject *)start(calls, steps, pair, args[4], args[5], limit, Py_None, NULL);
        DROP(pair);
        DROP(steps);
        if (work || PyErr_Occurred()) return work;
    }
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}
