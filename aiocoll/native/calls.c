/* Calls: collectives of one group that are carried out here, from the call to the end.

   A call is taken only if everything is plain: a prepared collective of one round, free slots, no hook, no early frame,
   the group's own timeout. Otherwise `start` returns None before anything was posted, and Python goes on. Whatever
   happens to a call later that is not plain (a frame instead of a post, another call of a peer, a report, a failure)
   hands it over: Python gets an operation that has posted, and carries on from there. */
#include "accelerator.h"

#include <math.h>

static uint32_t slot_of(const Calls *calls, uint64_t identity, uint32_t first, uint32_t slots) {
    return first + (uint32_t)((identity + calls->shift) % slots);
}

/* The dispatcher of the group, as a borrowed reference. The engine keeps this object to the end of the group, and must not keep the
   group that a program has dropped; who calls has it. */
PyObject *owner_of(const Calls *calls) { return PyWeakref_GetObject(calls->owner); }

/* ---- peers */

/* Return the lanes of a rank: NULL, without an exception, while there is no link through shared memory. */
static PeerLanes *peer_of(Calls *calls, int rank) {
    PeerLanes *peer = calls->peers[rank];
    if (peer && peer->can_post) return peer;
    PyObject *found = PyObject_CallFunction(calls->resolve, "i", rank);
    if (!found) return NULL;
    calls->epoch++;
    if (TYPE_OF(found) != PeerLanes_type || !((PeerLanes *)found)->can_post) {
        DROP(found);
        SET_REFERENCE(calls->peers[rank], NULL);
        return NULL;
    }
    SET_REFERENCE(calls->peers[rank], found);
    return calls->peers[rank];
}

/* Return whether a contribution can be posted; -1 for an exception. */
static int is_postable(Calls *calls, Contribution *each, uint64_t identity) {
    uint32_t slot = slot_of(calls, identity, each->first_slot, each->slots);
    for (int i = 0; i < each->readers_count; i++) {
        PeerLanes *peer = peer_of(calls, each->readers[i]);
        if (!peer) return PyErr_Occurred() ? -1 : 0;
        if (!each->is_common) {
            int is_there = lane_is_free(peer, slot) ? lane_reserve(peer, slot, each->nbytes) : 0;
            if (is_there <= 0) return is_there;
        }
        npy_intp room = slot_nbytes(each->is_common ? &peer->common->slots : &peer->slots, slot);
        if (each->nbytes > INLINE_NBYTES && each->nbytes > room) return 0;
    }
    if (!each->is_common || !each->readers_count) return 1;
    CommonLane *common = calls->peers[each->readers[0]]->common;
    int is_free = common_is_free(common, slot);
    return is_free > 0 ? common_reserve(common, slot, each->nbytes) : is_free;
}

static int are_postable(Calls *calls, Contribution *contributions, int count, uint64_t identity) {
    int postable = 1;
    for (int i = 0; i < count && postable > 0; i++) postable = is_postable(calls, contributions + i, identity);
    return postable;
}

/* The lanes of the readers, as Python's writers, which the common lane keeps. */
static PyObject *lanes_of(Calls *calls, Contribution *each) {
    if (each->lanes && each->epoch == calls->epoch) return each->lanes;
    PyObject *lanes = PyTuple_New(each->readers_count);
    if (!lanes) return NULL;
    for (int i = 0; i < each->readers_count; i++) {
        PyObject *writer = calls->peers[each->readers[i]]->writer;
        KEEP(writer);
        PyTuple_SetItem(lanes, i, writer);
    }
    SET_REFERENCE(each->lanes, lanes);
    each->epoch = calls->epoch;
    return lanes;
}

static int post_all(Handle *call, Contribution *contributions, int count) {
    Calls *calls = call->calls;
    for (int i = 0; i < count; i++) {
        Contribution *each = contributions + i;
        Post post = {slot_of(calls, call->identity, each->first_slot, each->slots), call->identity, calls->group,
                     call->steps->fingerprint, each->nbytes ? buffer_bytes(call, each->buffer) : NULL, each->nbytes};
        if (!each->is_common) {
            if (lane_post(calls->peers[each->readers[0]], &post) < 0) return -1;
            continue;
        }
        PeerLanes *peers[each->readers_count];
        for (int n = 0; n < each->readers_count; n++) peers[n] = calls->peers[each->readers[n]];
        PyObject *lanes = lanes_of(calls, each);
        if (!lanes || common_post(&post, peers, each->readers_count, lanes) < 0) return -1;
    }
    return 0;
}

/* ---- calls in flight */

static void link_call(Handle *call) {
    Calls *calls = call->calls;
    KEEP(call);
    call->previous = calls->last;
    call->next = NULL;
    if (calls->last) calls->last->next = call;
    else calls->first = call;
    calls->last = call;
    calls->count++;
    call->is_in_flight = 1;
}

/* Take a call out of the list, which had a reference to it: the caller has that now. */
static void unlink_call(Handle *call) {
    Calls *calls = call->calls;
    if (call->previous) call->previous->next = call->next;
    else calls->first = call->next;
    if (call->next) call->next->previous = call->previous;
    else calls->last = call->previous;
    call->previous = call->next = NULL;
    calls->count--;
    call->is_in_flight = 0;
}

/* Return the flat arrays of a call, as a list. */
static PyObject *buffers_of(Handle *call) {
    PyObject *arrays = call->arrays;
    if (PyList_Check(arrays)) return KEEP(arrays), arrays;
    if (PyTuple_Check(arrays)) {
        KEEP(arrays); /* of a copy, the call may end meanwhile */
        PyObject *made = PyObject_CallFunctionObjArgs(call->calls->flatten, call->steps->kind, PyTuple_GetItem(arrays, 0), PyTuple_GetItem(arrays, 1), NULL);
        DROP(arrays);
        return made;
    }
    PyObject *flat = PyArray_Ravel((PyArrayObject *)arrays, NPY_CORDER), *list = flat ? PyList_New(1) : NULL;
    if (!list) return DROP(flat), NULL;
    PyList_SetItem(list, 0, flat);
    return list;
}

/* Return an operation of Python's like a call. */
static PyObject *operation_of(Handle *call, PyObject *completion) {
    PyObject *arrays = buffers_of(call);
    if (!arrays) return NULL;
    PyObject *made = PyObject_CallFunction(call->calls->operation, "KOOOd", (unsigned long long)call->identity, call->steps->plan, arrays,
                                           completion, call->entered);
    DROP(arrays);
    return made;
}

/* Hand a call in flight over to Python, which gets its completion. */
int hand_over(Handle *call) {
    if (!call->is_in_flight) return 0;
    unlink_call(call);
    PyObject *completion = materialize(call), *operation = completion ? operation_of(call, completion) : NULL, *done = NULL;
    if (operation) done = PyObject_CallFunction(call->calls->take_over, "Oi", operation, call->missing);
    DROP(completion);
    DROP(operation);
    Py_CLEAR(call->arrays);
    DROP(call);
    if (!done) return -1;
    DROP(done);
    return 0;
}

/* Look for contributions that are missing; needs no interpreter. 1: all are there, 0: not yet, -1: it has to be handed over. */
int look_at(Handle *call) {
    const Calls *calls = call->calls;
    const Steps *steps = call->steps;
    for (; call->seen < steps->takes_count; call->seen++) {
        const Take *take = steps->takes + call->seen;
        PeerLanes *peer = calls->peers[take->peer];
        if (!peer || !peer->can_look) return -1;
        Post expected = {0, call->identity, calls->group, steps->fingerprint, NULL, take->nbytes};
        int found = lane_look(peer, take->is_common, slot_of(calls, call->identity, take->first_slot, take->slots), &expected, steps->is_private);
        if (found == DIFFERENT) return call->has_differed = 1, -1;
        if (found == MISSING) return call->missing = take->peer, 0;
    }
    return 1;
}

static char *contribution_bytes(const Calls *calls, const Take *take, uint64_t identity) {
    const PeerLanes *peer = calls->peers[take->peer];
    return slot_bytes(take->is_common ? &peer->common_slots : &peer->lane_slots, slot_of(calls, identity, take->first_slot, take->slots), take->nbytes);
}

/* Report an exception that is pending: the group fails on all ranks. */
static int crash(Calls *calls) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (value && traceback) PyException_SetTraceback(value, traceback);
    PyObject *done = PyObject_CallMethod(calls->comm, "crashed", "O", value ? value : Py_None);
    DROP(type);
    DROP(value);
    DROP(traceback);
    if (!done) return -1;
    DROP(done);
    return 0;
}

/* Use all contributions where they lie, free their slots, post the result, and end. */
int complete(Handle *call) {
    Calls *calls = call->calls;
    Steps *steps = call->steps;
    if (steps->last_count) {
        int postable = are_postable(calls, steps->last, steps->last_count, call->identity);
        if (postable <= 0) return postable < 0 ? crash(calls) : hand_over(call);
    }
    char *found[steps->takes_count ? steps->takes_count : 1];
    for (int i = 0; i < steps->takes_count; i++) found[i] = contribution_bytes(calls, steps->takes + i, call->identity);
    for (int i = 0; i < steps->moves_count; i++) {
        npy_intp nbytes = steps->takes[steps->moves[i].first].nbytes;
        memcpy(buffer_bytes(call, steps->moves[i].second), found[steps->moves[i].first], nbytes);
    }
    if (steps->target >= 0 && fold(call, found) < 0) return crash(calls);
    for (int i = 0; i < steps->takes_count; i++) {
        const Take *take = steps->takes + i;
        if (!lane_free(calls->peers[take->peer], take->is_common, slot_of(calls, call->identity, take->first_slot, take->slots), calls->group)) {
            PyObject *done = PyObject_CallFunction(calls->overwritten, "i", take->peer);
            if (!done) return crash(calls);
            DROP(done);
            return 0;
        }
    }
    if (steps->last_count && post_all(call, steps->last, steps->last_count) < 0) return crash(calls);
    double now = seconds();
    unlink_call(call);
    int failed = journal_ended(calls, call, now) < 0;
    if (!failed && call->key != Py_None) {
        PyObject *done = PyObject_CallFunction(calls->remember, "K", (unsigned long long)call->identity);
        failed = !done;
        DROP(done);
    }
    if (failed) failed = crash(calls); /* the call itself has ended well */
    if (handle_end(call) < 0) failed = crash(calls);
    DROP(call);
    return failed;
}

/* Look at all calls in flight, oldest first: whether any has ended; -1 for an exception. */
int look_at_all(Calls *calls) {
    int moved = 0;
    Handle *call = calls->first;
    KEEP(call);
    while (call) {
        Handle *next = call->next;
        KEEP(next);
        if (call->is_in_flight) {
            int found = look_at(call);
            if (found && (found > 0 ? complete(call) : hand_over(call)) < 0) {
                DROP(next);
                DROP(call);
                return -1;
            }
            moved |= found != 0;
        }
        DROP(call);
        /* What was called may have handed the next one over. */
        if (next && !next->is_in_flight) {
            DROP(next);
            next = calls->first;
            KEEP(next);
        }
        call = next;
    }
    return moved;
}

/* ---- starting */

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
    return (Steps *)steps;
}

static int are_arrays_right(const Steps *steps, PyObject *arrays) {
    if (!PyList_Check(arrays) || PyList_Size(arrays) < steps->buffers_count) return 0;
    for (int i = 0; i < steps->buffers_count; i++) {
        PyObject *array = PyList_GetItem(arrays, i);
        if (!steps->needed[i]) continue;
        if (!PyArray_Check(array) || !(PyArray_FLAGS((PyArrayObject *)array) & NPY_ARRAY_C_CONTIGUOUS)) return 0;
        if (PyArray_ITEMSIZE((PyArrayObject *)array) != steps->itemsize) return 0;
        if (PyArray_NBYTES((PyArrayObject *)array) < steps->needed[i]) return 0;
    }
    for (int i = 0; i < steps->copies_count; i++) {
        PyArrayObject *target = (PyArrayObject *)PyList_GetItem(arrays, steps->copies[i].first);
        if (PyArray_NBYTES(target) != PyArray_NBYTES((PyArrayObject *)PyList_GetItem(arrays, steps->copies[i].second))) return 0;
    }
    return 1;
}

/* Start the timer that looks at calls that take long, if it does not run. */
static int watch(Calls *calls) {
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
    *seq = PyLong_AsLongLong(entered) + 1;
    *identity = (uint64_t)*seq;
    DROP(entered);
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
        PyObject *code = PyObject_GetAttr(frame, name_code), *file = code ? PyObject_GetAttr(code, name_file) : NULL, *back = NULL;
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
            call->guard = number ? PyObject_CallFunction(calls->guard, "OOOi", call->steps->op, number, code, call->instruction) : NULL;
            DROP(number);
            return call->guard ? 0 : -1;
        }
        DROP(file);
        DROP(code);
        DROP(frame);
        frame = back;
    }
    DROP(frame);
    return -1;
}

static npy_intp buffer_nbytes(PyObject *arrays, int buffer, int size) {
    if (PyList_Check(arrays)) return PyArray_NBYTES((PyArrayObject *)PyList_GetItem(arrays, buffer));
    if (!PyTuple_Check(arrays)) return PyArray_NBYTES((PyArrayObject *)arrays);
    return PyArray_NBYTES((PyArrayObject *)PyTuple_GetItem(arrays, 0)) / size;
}

/* Start a call with prepared steps: NULL without an exception if Python has to carry it out, before anything was posted.
   The count of a key is taken then, as `taken` has it. */
static Handle *start(Calls *calls, Steps *steps, PyObject *arrays, PyObject *shape, PyObject *value, double limit, PyObject *key, PyObject **taken) {
    uint64_t identity = 0;
    int64_t seq = 0;
    /* The slots follow from the number, which is taken only if they are free. */
    if ((key == Py_None ? next_number(calls, &identity, &seq) : take_count(calls, key, &identity, &seq)) < 0) return NULL;
    int postable = are_postable(calls, steps->first, steps->first_count, identity);
    for (int i = 0; i < steps->takes_count && postable > 0; i++)
        if (!peer_of(calls, steps->takes[i].peer)) postable = PyErr_Occurred() ? -1 : 0;
    if (postable <= 0) {
        if (!postable && key != Py_None) *taken = Py_BuildValue("KL", (unsigned long long)identity, (long long)seq);
        return NULL;
    }
    if (watch(calls) < 0) return NULL;
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
    call->identity = identity;
    call->seq = seq;
    call->missing = NO_PEER;
    if (find_call_site(calls, call) < 0 || (key == Py_None && take_number(calls, seq) < 0)) {
        DROP(call);
        return NULL;
    }
    call->entered = seconds();
    for (int i = 0; i < steps->copies_count; i++)
        memmove(buffer_bytes(call, steps->copies[i].first), buffer_bytes(call, steps->copies[i].second), buffer_nbytes(arrays, steps->copies[i].first, calls->size));
    link_call(call);
    int failed = post_all(call, steps->first, steps->first_count) < 0 ? crash(calls) : 0;
    int found = call->is_in_flight ? look_at(call) : 0;
    if (found && !failed) failed = found > 0 ? complete(call) : hand_over(call);
    if (failed) {
        DROP(call);
        return NULL;
    }
    return call;
}

/* start(plan, arrays, shape, result, limit, key): return a work; None if Python has to carry it out, or, since the count of
   its key is taken, the id and the count. */
static PyObject *Calls_start(Calls *calls, PyObject *const *args, Py_ssize_t count) {
    if (count != 6) return PyErr_SetString(PyExc_TypeError, "start takes 6 arguments"), NULL;
    double limit = PyFloat_AsDouble(args[4]);
    if (limit == -1.0 && PyErr_Occurred()) return NULL;
    int plain = calls->comm ? is_plain(calls) : 0;
    if (plain < 0) return NULL;
    PyObject *taken = NULL;
    Handle *call = NULL;
    if (plain) {
        Steps *steps = steps_of(calls, args[0]);
        if (steps && TYPE_OF(steps) == Steps_type && are_arrays_right(steps, args[1]))
            call = start(calls, steps, args[1], args[2], args[3], limit, args[5], &taken);
        DROP(steps);
    }
    if (call || PyErr_Occurred()) return (PyObject *)call;
    if (taken) return taken;
    Py_RETURN_NONE;
}

/* ---- calls on plain arrays, from the group's methods */

static int is_carray(PyObject *array) {
    return TYPE_OF(array) == &PyArray_Type && (PyArray_FLAGS((PyArrayObject *)array) & NPY_ARRAY_CARRAY) == NPY_ARRAY_CARRAY &&
           PyArray_NDIM((PyArrayObject *)array) <= DIMENSIONS;
}

static Known *known_at(Calls *calls, PyObject *kind, PyObject *op, PyObject *root, PyArrayObject *array, PyArrayObject *other) {
    uintptr_t hash = (uintptr_t)kind ^ (uintptr_t)PyArray_DESCR(array) >> 4 ^ (uintptr_t)op >> 5 ^ (uintptr_t)root >> 3;
    for (int i = 0; i < PyArray_NDIM(array); i++) hash = hash * 1000003 ^ (uintptr_t)PyArray_DIM(array, i);
    if (other)
        for (int i = 0; i < PyArray_NDIM(other); i++) hash = hash * 1000003 ^ (uintptr_t)PyArray_DIM(other, i);
    return calls->known + (hash ^ hash >> 17 ^ hash >> 7) % KNOWN;
}

static int is_like(const Known *known, PyObject *kind, PyObject *op, PyObject *root, PyArrayObject *array, PyArrayObject *other) {
    if (!known->steps || known->kind != kind || known->op != op || known->root != root || known->dtype != PyArray_DESCR(array)) return 0;
    if (known->dimensions != PyArray_NDIM(array) || memcmp(known->shape, PyArray_DIMS(array), known->dimensions * sizeof(npy_intp))) return 0;
    if (!other) return known->other_dimensions < 0;
    if (PyArray_DESCR(other) != known->dtype || known->other_dimensions != PyArray_NDIM(other)) return 0;
    return !memcmp(known->shape + DIMENSIONS, PyArray_DIMS(other), known->other_dimensions * sizeof(npy_intp));
}

static void forget(Known *known) {
    Py_CLEAR(known->kind);
    Py_CLEAR(known->op);
    Py_CLEAR(known->root);
    Py_CLEAR(known->dtype);
    Py_CLEAR(known->steps);
}

/* Return the steps of a call, as a borrowed reference: NULL, without an exception, if there are none. */
static Steps *find_steps(Calls *calls, PyObject *kind, PyObject *op, PyObject *root, PyObject *array, PyObject *other) {
    PyArrayObject *first = (PyArrayObject *)array, *second = (PyArrayObject *)other;
    Known *known = known_at(calls, kind, op, root, first, second);
    if (is_like(known, kind, op, root, first, second)) return known->steps;
    PyObject *plan = other ? PyObject_CallFunctionObjArgs(calls->find_parts, kind, array, other, op, NULL)
                           : PyObject_CallFunctionObjArgs(calls->find_one, kind, array, op, root, NULL);
    if (!plan || plan == Py_None) {
        DROP(plan);
        return NULL;
    }
    Steps *steps = steps_of(calls, plan);
    DROP(plan);
    if (!steps || TYPE_OF(steps) != Steps_type || steps->storage != PyArray_DESCR(first)) {
        DROP(steps);
        return NULL;
    }
    forget(known);
    KEEP(kind), known->kind = kind;
    KEEP(op), known->op = op;
    KEEP(root), known->root = root;
    KEEP(PyArray_DESCR(first)), known->dtype = PyArray_DESCR(first);
    known->dimensions = PyArray_NDIM(first);
    memcpy(known->shape, PyArray_DIMS(first), known->dimensions * sizeof(npy_intp));
    known->other_dimensions = other ? PyArray_NDIM(second) : -1;
    if (other) memcpy(known->shape + DIMENSIONS, PyArray_DIMS(second), known->other_dimensions * sizeof(npy_intp));
    known->steps = steps;
    return steps;
}

static int is_true(PyObject *object, PyObject *name) {
    PyObject *value = PyObject_GetAttr(object, name);
    int found = value == Py_True ? 1 : value == Py_False ? 0 : value ? PyObject_IsTrue(value) : -1;
    DROP(value);
    return found;
}

/* Whether a call made here and now is plain: this thread and loop, no interceptor, an open group, its own timeout. */
static int may_start(Calls *calls) {
    if (PyThread_get_thread_ident() != calls->thread || calls->forks != forks_of_process) return 0;
    PyObject *running = PyObject_CallNoArgs(calls->is_running);
    DROP(running);
    if (running != Py_True) return running ? 0 : -1;
    int found = is_true(owner_of(calls), name_diverts);
    if (!found) found = is_true(calls->comm, name_barred);
    if (found) return found < 0 ? -1 : 0;
    PyObject *timeout = PyObject_GetAttr(calls->comm, name_default_timeout);
    if (!timeout) return -1;
    if (timeout != calls->timeout) {
        calls->limit = PyFloat_AsDouble(timeout);
        KEEP(timeout);
        SET_REFERENCE(calls->timeout, timeout);
    }
    DROP(timeout);
    return isnan(calls->limit) ? 0 : is_plain(calls);
}

static int share_memory(PyArrayObject *first, PyArrayObject *second) {
    char *a = PyArray_BYTES(first), *b = PyArray_BYTES(second);
    return a < b + PyArray_NBYTES(second) && b < a + PyArray_NBYTES(first);
}

/* one(kind, tensor, op, root, writable, timeout, key): as `Dispatcher.one`, which gets what is not plain. */
static PyObject *Calls_one(Calls *calls, PyObject *const *args, Py_ssize_t count) {
    if (count != 7) return PyErr_SetString(PyExc_TypeError, "one takes 7 arguments"), NULL;
    if (calls->comm && args[5] == Py_None && args[6] == Py_None && is_carray(args[1])) {
        int may = may_start(calls);
        if (may < 0) return NULL;
        Steps *steps = may ? find_steps(calls, args[0], args[2], args[3], args[1], NULL) : NULL;
        if (!steps && PyErr_Occurred()) return NULL;
        PyObject *shape = steps ? PyObject_GetAttr(args[1], name_shape) : NULL;
        PyObject *work = shape ? (PyObject *)start(calls, steps, args[1], shape, args[1], calls->limit, Py_None, NULL) : NULL;
        DROP(shape);
        if (work || PyErr_Occurred()) return work;
    }
    PyObject *arguments = PyTuple_New(count), *work;
    for (Py_ssize_t i = 0; arguments && i < count; i++) KEEP(args[i]), PyTuple_SetItem(arguments, i, args[i]);
    PyObject *function = arguments ? PyObject_GetAttrString(owner_of(calls), "one") : NULL;
    work = function ? PyObject_Call(function, arguments, NULL) : NULL;
    DROP(function);
    DROP(arguments);
    return work;
}

/* parts(kind, whole, other, op, shape, result, timeout, key): start a call on an array of equal parts, and one of a part or as
   many; None if it is not plain. */
static PyObject *Calls_parts(Calls *calls, PyObject *const *args, Py_ssize_t count) {
    if (count != 8) return PyErr_SetString(PyExc_TypeError, "parts takes 8 arguments"), NULL;
    PyObject *whole = args[1], *other = args[2];
    if (!calls->comm || args[6] != Py_None || args[7] != Py_None || !is_carray(whole) || !is_carray(other)) Py_RETURN_NONE;
    if (share_memory((PyArrayObject *)whole, (PyArrayObject *)other)) Py_RETURN_NONE;
    int may = may_start(calls);
    if (may < 0) return NULL;
    Steps *steps = may ? find_steps(calls, args[0], args[3], Py_None, whole, other) : NULL;
    if (steps) {
        PyObject *pair = PyTuple_Pack(2, whole, other), *work = NULL;
        if (pair) work = (PyObject *)start(calls, steps, pair, args[4], args[5], calls->limit, Py_None, NULL);
        DROP(pair);
        if (work || PyErr_Occurred()) return work;
    }
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

/* ---- for Python */

static PyObject *Calls_look(Calls *self, PyObject *Py_UNUSED(unused)) {
    int moved = self->count ? look_at_all(self) : 0;
    return moved < 0 ? NULL : PyBool_FromLong(moved);
}

static PyObject *Calls_hand_over(Calls *self, PyObject *args) {
    unsigned long long identity = 0;
    if (!PyArg_ParseTuple(args, "|K", &identity)) return NULL;
    for (Handle *call = self->first, *next; call; call = next) {
        next = call->next;
        if (identity && call->identity != identity) continue;
        if (hand_over(call) < 0) return NULL;
        if (next && !next->is_in_flight) next = self->first;
    }
    Py_RETURN_NONE;
}

/* Return operations like the calls in flight, for readers in any thread. Python may run other threads meanwhile, so a call may
   end while it is copied. */
static PyObject *Calls_copies(Calls *self, PyObject *Py_UNUSED(unused)) {
    PyObject *calls = PyList_New(0), *copies = calls ? PyList_New(0) : NULL;
    for (Handle *call = self->first; copies && call; call = call->next)
        if (PyList_Append(calls, (PyObject *)call) < 0) Py_CLEAR(copies);
    for (Py_ssize_t i = 0; copies && i < PyList_Size(calls); i++) {
        Handle *call = (Handle *)PyList_GetItem(calls, i);
        if (!call->is_in_flight) continue;
        PyObject *completion = completion_of(call, Py_None, Py_None), *copy = NULL;
        if (completion && !call->is_in_flight) { /* it has ended meanwhile */
            DROP(completion);
            continue;
        }
        if (completion) copy = operation_of(call, completion);
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

static PyObject *attribute(PyObject *object, const char *name, PyObject **place) { return *place = PyObject_GetAttrString(object, name); }

/* Calls(comm, owner, work_type, seams, folder, group, rank, size, spin, crowded): `seams` are functions of Python, `folder`
   is that of the package. */
static int Calls_init(Calls *self, PyObject *args, PyObject *kwargs) {
    PyObject *seams, *turn, *journal = NULL, *endpoint = NULL, *loop = NULL, *stalls = NULL, *context = NULL;
    int failed = -1;
    unsigned long long group;
    if (!PyArg_ParseTuple(args, "OOOO!UKiidp", &self->comm, &self->owner, &self->work_type, &PyDict_Type,
                          &seams, &self->folder, &group, &self->rank, &self->size, &self->spin, &self->is_crowded)) {
        self->comm = self->owner = self->work_type = self->folder = NULL;
        return -1;
    }
    KEEP(self->comm), KEEP(self->work_type), KEEP(self->folder);
    if (!(self->owner = PyWeakref_NewRef(self->owner, NULL))) return -1;
    if (!PyObject_IsSubclass(self->work_type, (PyObject *)Handle_type)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "works need the base of this module");
        return -1;
    }
    if (!(self->peers = PyMem_Calloc(self->size, sizeof *self->peers))) return PyErr_NoMemory(), -1;
    self->group = group;
    self->shift = (uint32_t)(group % LAYOUT_SMALL_SLOTS);
    self->epoch = 1;
    self->allocate = (allocfunc)PyType_GetSlot((PyTypeObject *)self->work_type, Py_tp_alloc);
    struct { const char *name; PyObject **place; } functions[] = {
        {"resolve", &self->resolve}, {"make_steps", &self->make_steps}, {"flatten", &self->flatten}, {"find_parts", &self->find_parts}, {"find_one", &self->find_one}, {"take_over", &self->take_over},
        {"remember", &self->remember}, {"operation", &self->operation}, {"guard", &self->guard}, {"overwritten", &self->overwritten}, {"rest", &self->rest}, {"quiet", &self->quiet}};
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        PyObject *found = PyDict_GetItemString(seams, functions[i].name);
        if (!found) return PyErr_Format(PyExc_KeyError, "%s", functions[i].name), -1;
        KEEP(found), *functions[i].place = found;
    }
    if (!attribute(self->comm, "left", &self->left) || !attribute(self->comm, "early", &self->early)) goto end;
    if (!attribute(self->comm, "hooks", &self->hooks) || !attribute(self->comm, "stalls", &stalls)) goto end;
    if (!attribute(stalls, "asked_early", &self->asked_early) || !attribute(self->comm, "endpoint", &endpoint)) goto end;
    if (!attribute(endpoint, "watch", &self->watch) || !attribute(endpoint, "runtime", &self->runtime)) goto end;
    if (!attribute(endpoint, "polling", &self->polling) || !attribute(endpoint, "loop", &loop)) goto end;
    if (!attribute(loop, "is_running", &self->is_running) || !attribute(loop, "create_future", &self->create_future)) goto end;
    if (!attribute(self->polling, "turn", &turn)) goto end;
    failed = PyObject_GetBuffer(turn, &self->turn, PyBUF_WRITABLE);
    DROP(turn);
    self->thread = PyThread_get_thread_ident();
    self->forks = forks_of_process;
    if (!failed && (failed = !attribute(self->comm, "journal", &journal) ? -1 : 0) == 0)
        failed = journal_open(&self->journal, journal, self->size);
end:
    DROP(journal);
    self->progress = endpoint;
    DROP(loop);
    DROP(stalls);
    DROP(context);
    return failed;
}

static int Calls_traverse(Calls *self, visitproc visit, void *arg) {
    Py_VISIT(TYPE_OF(self));
    PyObject *objects[] = {self->comm, self->owner, self->work_type, self->resolve, self->make_steps, self->find_one, self->find_parts, self->flatten, self->take_over,
                           self->remember, self->operation, self->guard, self->overwritten, self->left, self->early, self->asked_early, self->hooks, self->watch, self->runtime,
                           self->polling, self->is_running, self->create_future, self->rest, self->quiet, self->progress,
                           self->journal.journal, self->journal.ring, self->journal.objects};
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

/* Let go of what calls need; works that have ended, and calls that are refused, need the rest. */
static void end_calls(Calls *self) {
    PyObject **places[] = {&self->comm, &self->work_type, &self->resolve, &self->make_steps, &self->find_one, &self->find_parts, &self->flatten, &self->take_over,
                           &self->remember, &self->operation, &self->guard, &self->overwritten, &self->left, &self->early, &self->asked_early, &self->hooks, &self->watch,
                           &self->polling, &self->is_running, &self->create_future, &self->rest, &self->quiet, &self->folder, &self->last_file, &self->timeout};
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
    end_calls(self);
    Py_CLEAR(self->owner);
    Py_CLEAR(self->runtime);
    Py_CLEAR(self->progress);
    return 0;
}

static PyObject *Calls_close(Calls *self, PyObject *Py_UNUSED(unused)) {
    end_calls(self);
    Py_RETURN_NONE;
}

static void Calls_dealloc(Calls *self) {
    PyTypeObject *type = TYPE_OF(self);
    PyObject_GC_UnTrack(self);
    Calls_clear(self);
    PyBuffer_Release(&self->turn);
    PyMem_Free(self->peers);
    PyMem_Free(self->scratch);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    DROP(type);
}

static PyMethodDef Calls_methods[] = {
    {"start", (PyCFunction)(void (*)(void))Calls_start, METH_FASTCALL, "Start a prepared collective."},
    {"one", (PyCFunction)(void (*)(void))Calls_one, METH_FASTCALL, "Start a collective on one array."},
    {"parts", (PyCFunction)(void (*)(void))Calls_parts, METH_FASTCALL, "Start a collective on an array of equal parts; None if it is not plain."},
    {"look", (PyCFunction)Calls_look, METH_NOARGS, "Look at all calls in flight; return whether any has moved."},
    {"hand_over", (PyCFunction)Calls_hand_over, METH_VARARGS, "Hand the call with this id, or all calls, over to Python."},
    {"copies", (PyCFunction)Calls_copies, METH_NOARGS, "Return operations like the calls in flight, for readers in any thread."},
    {"relink", (PyCFunction)Calls_relink, METH_NOARGS, "Forget what follows from the links of the group."},
    {"close", (PyCFunction)Calls_close, METH_NOARGS, "Let go of the group."},
    {0}};
static PyMemberDef Calls_members[] = {
    {"count", T_PYSSIZET, offsetof(Calls, count), READONLY, "Calls in flight."},
    {"shift", T_UINT, offsetof(Calls, shift), 0, "Added to the id of an operation to find its slot."},
    {"watches", T_INT, offsetof(Calls, watches), 0, "Whether a work that is never awaited leads to a warning."},
    {"comm", T_OBJECT_EX, offsetof(Calls, comm), READONLY, "The group."},
    {0}};
static PyType_Slot Calls_slots[] = {
    {Py_tp_doc, "The calls of one group that are carried out in C."}, {Py_tp_new, PyType_GenericNew}, {Py_tp_init, Calls_init},
    {Py_tp_traverse, Calls_traverse}, {Py_tp_clear, Calls_clear}, {Py_tp_dealloc, Calls_dealloc}, {Py_tp_methods, Calls_methods}, {Py_tp_members, Calls_members}, {0}};
PyType_Spec Calls_spec = {"aiocoll.native._core.Calls", sizeof(Calls), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, Calls_slots};
