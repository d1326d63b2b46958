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
enum { TRIES = 3 }; /* how often it is looked again after functions of Python were asked */

static int is_true(PyObject *object, PyObject *name) {
    PyObject *value = PyObject_GetAttr(object, name);
    int found = value == Py_True ? 1 : value == Py_False ? 0 : value ? PyObject_IsTrue(value) : -1;
    DROP(value);
    return found;
}

/* ---- peers */

/* Return the lanes of a rank: NULL, without an exception, while there is no link through shared memory. */
static PeerLanes *peer_of(Calls *calls, int rank) {
    PeerLanes *peer = calls->peers[rank];
    if (peer && peer->can_post) return peer;
    PyObject *found = PyObject_CallFunction(calls->resolve, "i", rank);
    if (!found) return NULL;
    calls->epoch++;
    calls->asked++;
    if (TYPE_OF(found) != PeerLanes_type || !((PeerLanes *)found)->can_post) {
        DROP(found);
        SET_REFERENCE(calls->peers[rank], NULL);
        return NULL;
    }
    SET_REFERENCE(calls->peers[rank], found);
    return calls->peers[rank];
}

/* Make the lanes of the readers, as Python's writers, which the common lane keeps. */
static int lanes_of(Calls *calls, Contribution *each) {
    if (each->lanes && each->epoch == calls->epoch) return 0;
    calls->asked++; /* what is made may start a collection of garbage */
    PyObject *lanes = PyTuple_New(each->readers_count);
    for (int i = 0; lanes && i < each->readers_count; i++) {
        PeerLanes *peer = calls->peers[each->readers[i]];
        PyObject *writer = peer && peer->writer ? peer->writer : Py_None;
        KEEP(writer);
        PyTuple_SetItem(lanes, i, writer);
    }
    if (!lanes) return -1;
    SET_REFERENCE(each->lanes, lanes);
    each->epoch = calls->epoch;
    return 0;
}

/* Make the memory of a slot for a contribution that fits: 0 if it does not, or the host has none. */
static int reserved(Calls *calls, PeerLanes *peer, uint32_t slot, const Contribution *each) {
    const Slots *slots = each->is_common ? &peer->common->slots : &peer->slots;
    if (each->nbytes > INLINE_NBYTES && each->nbytes > slot_nbytes(slots, slot)) return 0;
    if (each->is_common ? common_has(peer->common, slot, each->nbytes) : lane_has(peer, slot, each->nbytes)) return 1;
    calls->asked++;
    return each->is_common ? common_reserve(peer->common, slot, each->nbytes) : lane_reserve(peer, slot, each->nbytes);
}

/* Return whether a contribution can be posted; -1 for an exception. Where `asked` has changed, what was found for others may
   not hold any more. */
static int is_postable(Calls *calls, Contribution *each, uint64_t identity) {
    uint32_t slot = slot_of(calls, identity, each->first_slot, each->slots);
    for (int i = 0; i < each->readers_count; i++) {
        PeerLanes *peer = peer_of(calls, each->readers[i]);
        if (!peer) return PyErr_Occurred() ? -1 : 0;
        if (!each->is_common) {
            int is_there = lane_is_free(peer, slot) ? reserved(calls, peer, slot, each) : 0;
            if (is_there <= 0) return is_there;
        }
    }
    if (!each->is_common) return 1;
    PeerLanes *peer = calls->peers[each->readers[0]];
    int is_free = peer && peer->common ? common_is_free(peer->common, slot) : 0;
    if (is_free <= 0 || lanes_of(calls, each) < 0) return is_free <= 0 ? is_free : -1;
    return reserved(calls, peer, slot, each);
}

static int are_postable(Calls *calls, Contribution *contributions, int count, uint64_t identity) {
    int postable = 1;
    for (int i = 0; i < count && postable > 0; i++) postable = is_postable(calls, contributions + i, identity);
    return postable;
}

/* Wake the readers of contributions. */
static int ring(Calls *calls, const Contribution *contributions, int count) {
    if (attend(calls->peers[contributions[0].readers[0]]) < 0) return -1;
    fence_full();
    for (int i = 0; i < count; i++)
        for (int n = 0; n < contributions[i].readers_count; n++) {
            PeerLanes *peer = calls->peers[contributions[i].readers[n]];
            if (peer && peer->can_post) wake(peer);
        }
    return 0;
}

/* Post contributions that `are_postable`, since when no function of Python has run. */
static int post_all(Handle *call, Contribution *contributions, int count) {
    if (!count) return 0;
    Calls *calls = call->calls;
    for (int i = 0; i < count; i++) {
        Contribution *each = contributions + i;
        Post post = {slot_of(calls, call->identity, each->first_slot, each->slots),
                     {call->identity, calls->group, call->steps->fingerprint, (uint64_t)each->nbytes},
                     each->nbytes ? buffer_bytes(call, each->buffer) : NULL};
        if (!each->is_common) {
            lane_post(calls->peers[each->readers[0]], &post);
            continue;
        }
        PeerLanes *peers[each->readers_count];
        for (int n = 0; n < each->readers_count; n++) peers[n] = calls->peers[each->readers[n]];
        if (common_post(&post, peers, each->readers_count, each->lanes) < 0) return -1;
    }
    return ring(calls, contributions, count);
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
static PyObject *buffers_of(Handle *call, PyObject *arrays) {
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
static PyObject *operation_of(Handle *call, PyObject *given, PyObject *completion) {
    PyObject *arrays = buffers_of(call, given);
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
    PyObject *completion = materialize(call), *operation = completion ? operation_of(call, call->arrays, completion) : NULL, *done = NULL;
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
        Head expected = {call->identity, calls->group, steps->fingerprint, (uint64_t)take->nbytes};
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

/* Report an exception that is pending: the group fails on all ranks. What is no Exception, as KeyboardInterrupt, goes on: -1. */
static int crash(Calls *calls) {
    PyObject *type, *value, *traceback;
    if (!calls->comm) return -1;
    int is_error = PyErr_ExceptionMatches(PyExc_Exception);
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (value && traceback) PyException_SetTraceback(value, traceback);
    PyObject *done = PyObject_CallMethod(calls->comm, "crashed", "O", value ? value : Py_None);
    if (done && !is_error) {
        PyErr_Restore(type, value, traceback);
    } else {
        DROP(type);
        DROP(value);
        DROP(traceback);
    }
    DROP(done);
    return done && is_error ? 0 : -1;
}

/* `crash` for a call that was taken out of the list, the reference of which is given up: it fails with the others. */
static int crash_call(Handle *call) {
    Calls *calls = call->calls;
    link_call(call);
    int failed = crash(calls);
    DROP(call);
    return failed;
}

/* Write the record of a call that has ended well, and count it. */
static int note_end(Handle *call) {
    Calls *calls = call->calls;
    if (journal_ended(calls, call, seconds()) < 0) return -1;
    if (call->key == Py_None) return 0;
    PyObject *done = PyObject_CallFunction(calls->remember, "K", (unsigned long long)call->identity);
    DROP(done);
    return done ? 0 : -1;
}

/* Find out whether the last contributions can be posted. Functions of Python may have changed what was there of peers, and may
   have taken the call over: 0. */
static int may_complete(Handle *call) {
    Calls *calls = call->calls;
    Steps *steps = call->steps;
    for (int tries = 0; tries < TRIES && call->is_in_flight; tries++) {
        uint64_t asked = calls->asked;
        int postable = steps->last_count ? are_postable(calls, steps->last, steps->last_count, call->identity) : 1;
        if (postable < 0) return -1;
        if (!call->is_in_flight) return 0;
        if (!postable) break;
        if (calls->asked == asked) return 1;
        call->seen = 0;
        if (look_at(call) <= 0) break;
    }
    return hand_over(call);
}

/* Reduce by a function of Python, which may do anything: the memory stays, but peers may not. */
static int fold_safely(Handle *call, char **found) {
    Calls *calls = call->calls;
    const Steps *steps = call->steps;
    if (steps->loop) return fold(call, found);
    PeerLanes *peers[steps->takes_count ? steps->takes_count : 1];
    for (int i = 0; i < steps->takes_count; i++) pin(peers[i] = calls->peers[steps->takes[i].peer]);
    int failed = fold(call, found), has_changed = 0;
    for (int i = 0; i < steps->takes_count; i++) {
        has_changed |= calls->peers[steps->takes[i].peer] != peers[i] || !peers[i]->can_look;
        unpin(peers[i]);
    }
    if (!failed && steps->last_count) {
        uint64_t asked = calls->asked;
        int postable = calls->comm ? are_postable(calls, steps->last, steps->last_count, call->identity) : 0;
        if (postable < 0) return -1;
        has_changed |= !postable || calls->asked != asked;
    }
    if (!failed && (has_changed || !calls->comm)) {
        PyErr_SetString(PyExc_RuntimeError, "a link was closed while its data was reduced");
        return -1;
    }
    return failed;
}

/* Use all contributions where they lie, free their slots, post the result, and end. */
int complete(Handle *call) {
    Calls *calls = call->calls;
    Steps *steps = call->steps;
    int may = may_complete(call);
    if (may <= 0) return may < 0 ? crash(calls) : 0;
    /* From here on nothing takes it over; its reference is this function's. */
    unlink_call(call);
    char *found[steps->takes_count ? steps->takes_count : 1];
    for (int i = 0; i < steps->takes_count; i++) found[i] = contribution_bytes(calls, steps->takes + i, call->identity);
    for (int i = 0; i < steps->moves_count; i++) {
        npy_intp nbytes = steps->takes[steps->moves[i].first].nbytes;
        memcpy(buffer_bytes(call, steps->moves[i].second), found[steps->moves[i].first], nbytes);
    }
    if (steps->target >= 0 && fold_safely(call, found) < 0) return crash_call(call);
    for (int i = 0; i < steps->takes_count; i++) {
        const Take *take = steps->takes + i;
        if (!lane_free(calls->peers[take->peer], take->is_common, slot_of(calls, call->identity, take->first_slot, take->slots), calls->group)) {
            PyObject *done = PyObject_CallFunction(calls->overwritten, "i", take->peer);
            DROP(done);
            return crash_call(call);
        }
    }
    if (post_all(call, steps->last, steps->last_count) < 0) return crash_call(call);
    int failed = calls->comm ? note_end(call) : 0; /* its doorbell may have closed the group */
    if (failed) failed = crash(calls);             /* the call itself has ended well */
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    int ended = handle_end(call);
    if (ended < 0) ended = crash(calls);
    if (type) PyErr_Restore(type, value, traceback);
    DROP(call);
    return failed || ended ? -1 : 0;
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
    if (steps && (TYPE_OF(steps) != Steps_type || ((Steps *)steps)->size != calls->size)) return DROP(steps), NULL;
    return (Steps *)steps;
}

/* Whether arrays have what the steps need of each buffer, as `buffer_bytes` finds them: an array that is the only buffer, or an
   array of as many parts as there are ranks, and another one. */
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
        if (!PyArray_Check(array) || !PyArray_CHKFLAGS((PyArrayObject *)array, NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED)) return 0;
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
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "a call was made from no frame");
    return -1;
}

static npy_intp buffer_nbytes(PyObject *arrays, int buffer, int size) {
    if (PyList_Check(arrays)) return PyArray_NBYTES((PyArrayObject *)PyList_GetItem(arrays, buffer));
    if (!PyTuple_Check(arrays)) return PyArray_NBYTES((PyArrayObject *)arrays);
    return PyArray_NBYTES((PyArrayObject *)PyTuple_GetItem(arrays, 0)) / size;
}

/* Make a call; nothing is posted yet. */
static Handle *make_call(Calls *calls, Steps *steps, PyObject *arrays, PyObject *shape, PyObject *value, double limit, PyObject *key) {
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

/* Whether a call can be posted: no function of Python has run since that was found out. Its number is its own then; without a
   key, it is the next one. -1: an exception. */
static int is_ready(Handle *call) {
    Calls *calls = call->calls;
    const Steps *steps = call->steps;
    for (int tries = 0; tries < TRIES; tries++) {
        uint64_t asked = calls->asked, identity;
        int64_t seq;
        int is_barred = calls->comm ? is_true(calls->comm, name_barred) : 1;
        if (is_barred) return is_barred < 0 ? -1 : 0;
        if (call->key == Py_None) {
            if (next_number(calls, &identity, &seq) < 0) return -1;
            if (seq != call->seq) return 0; /* a finalizer has made a call */
        }
        int postable = are_postable(calls, steps->first, steps->first_count, call->identity);
        for (int i = 0; i < steps->takes_count && postable > 0; i++) {
            const Take *take = steps->takes + i;
            PeerLanes *peer = peer_of(calls, take->peer);
            if (!peer) return PyErr_Occurred() ? -1 : 0;
            const Slots *slots = take->is_common ? &peer->common_slots : &peer->lane_slots;
            if (take->nbytes > INLINE_NBYTES && take->nbytes > slot_nbytes(slots, take->first_slot)) return 0;
        }
        if (postable <= 0 || calls->asked == asked) return postable;
    }
    return 0;
}

/* Start a call with prepared steps: NULL without an exception if Python has to carry it out, before anything was posted.
   The count of a key is taken then, as `taken` has it. */
static Handle *start(Calls *calls, Steps *steps, PyObject *arrays, PyObject *shape, PyObject *value, double limit, PyObject *key, PyObject **taken) {
    if (watch(calls) < 0) return NULL;
    Handle *call = make_call(calls, steps, arrays, shape, value, limit, key);
    if (!call) return NULL;
    /* The slots follow from the number, which is taken only if they are free. */
    int failed = key == Py_None ? next_number(calls, &call->identity, &call->seq) : take_count(calls, key, &call->identity, &call->seq);
    int ready = failed || find_call_site(calls, call) < 0 ? -1 : is_ready(call);
    if (!ready && key != Py_None) *taken = Py_BuildValue("KL", (unsigned long long)call->identity, (long long)call->seq);
    if (!ready && note_await(call) < 0) ready = -1; /* nobody gets this work */
    if (ready <= 0 || (key == Py_None && take_number(calls, call->seq) < 0)) {
        DROP(call);
        return NULL;
    }
    call->entered = seconds();
    for (int i = 0; i < steps->copies_count; i++)
        memmove(buffer_bytes(call, steps->copies[i].first), buffer_bytes(call, steps->copies[i].second), buffer_nbytes(arrays, steps->copies[i].first, calls->size));
    link_call(call);
    failed = post_all(call, steps->first, steps->first_count) < 0 ? crash(calls) : 0;
    int found = call->is_in_flight && !failed ? look_at(call) : 0;
    if (found) failed = found > 0 ? complete(call) : hand_over(call);
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
    Known made = {kind, op, root, PyArray_DESCR(first), .dimensions = PyArray_NDIM(first), .other_dimensions = other ? PyArray_NDIM(second) : -1, .steps = steps};
    memcpy(made.shape, PyArray_DIMS(first), made.dimensions * sizeof(npy_intp));
    if (other) memcpy(made.shape + DIMENSIONS, PyArray_DIMS(second), made.other_dimensions * sizeof(npy_intp));
    KEEP(kind), KEEP(op), KEEP(root), KEEP(made.dtype), KEEP(steps);
    Known old = *known;
    *known = made;
    forget(&old);
    return steps;
}

/* Whether a call made here and now is plain: this thread and loop, no interceptor, an open group, its own timeout. */
static int may_start(Calls *calls) {
    if (PyThread_get_thread_ident() != calls->thread || calls->forks != forks_of_process) return 0;
    PyObject *running = PyObject_CallNoArgs(calls->is_running);
    DROP(running);
    if (running != Py_True) return running ? 0 : -1;
    int found = is_true(owner_of(calls), name_diverts);
    if (found) return found < 0 ? -1 : 0;
    PyObject *timeout = PyObject_GetAttr(calls->comm, name_default_timeout);
    if (!timeout) return -1;
    if (timeout != calls->timeout) {
        calls->limit = PyFloat_AsDouble(timeout);
        KEEP(timeout);
        SET_REFERENCE(calls->timeout, timeout);
    }
    DROP(timeout);
    if (calls->limit == -1.0 && PyErr_Occurred()) return -1;
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
        DROP(steps);
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

/* Return operations like the calls in flight, for readers in any thread. Python may run other threads meanwhile, so a call may
   end while it is copied. */
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

static PyObject *attribute(PyObject *object, const char *name, PyObject **place) { return *place = PyObject_GetAttrString(object, name); }

/* Calls(comm, owner, work_type, seams, folder, group, rank, size, spin, crowded): `seams` are functions of Python, `folder`
   is that of the package. */
static int Calls_init(Calls *self, PyObject *args, PyObject *kwargs) {
    PyObject *seams, *turn, *journal = NULL, *endpoint = NULL, *loop = NULL, *stalls = NULL, *context = NULL;
    int failed = -1;
    unsigned long long group;
    if (self->work_type) return PyErr_SetString(PyExc_TypeError, "they were initialized before"), -1;
    if (!PyArg_ParseTuple(args, "OOOO!UKiidp", &self->comm, &self->owner, &self->work_type, &PyDict_Type,
                          &seams, &self->folder, &group, &self->rank, &self->size, &self->spin, &self->is_crowded)) {
        self->comm = self->owner = self->work_type = self->folder = NULL;
        return -1;
    }
    KEEP(self->comm), KEEP(self->work_type), KEEP(self->folder);
    if (!(self->owner = PyWeakref_NewRef(self->owner, NULL))) return -1;
    if (!PyType_Check(self->work_type) || PyObject_IsSubclass(self->work_type, (PyObject *)Handle_type) != 1) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "works need the base of this module");
        return -1;
    }
    if (self->size < 1 || self->rank < 0 || self->rank >= self->size) return PyErr_SetString(PyExc_ValueError, "there is no such rank"), -1;
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
    if (!failed && self->turn.len < (Py_ssize_t)sizeof(double)) failed = (PyErr_SetString(PyExc_ValueError, "the turn is a number"), -1);
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

/* Let go of the group. What works that have ended refer to stays: the loop, and the owner, which refuses calls from now on. */
static void leave_group(Calls *self) {
    PyObject **places[] = {&self->comm, &self->resolve, &self->make_steps, &self->find_one, &self->find_parts, &self->flatten, &self->take_over, &self->remember, &self->operation,
                           &self->guard, &self->overwritten, &self->left, &self->early, &self->asked_early, &self->hooks, &self->watch, &self->rest, &self->quiet, &self->folder, &self->last_file, &self->timeout};
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
