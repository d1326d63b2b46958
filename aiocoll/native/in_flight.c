/* Calls in flight: checks for contributions of peers, completion, hand-over to Python. */
#include "accelerator.h"

/* Add a call to the list of calls in flight: after all posted calls, or at the end if it waits for a slot. */
void link_call(Handle *call) {
    Calls *calls = call->calls;
    KEEP(call);
    call->next = call->is_posted ? calls->first_waiting : NULL;
    call->previous = call->next ? call->next->previous : calls->last;
    if (call->previous) call->previous->next = call;
    else calls->first = call;
    if (call->next) call->next->previous = call;
    else calls->last = call;
    calls->count++;
    calls->relays += call->relay != NULL;
    call->is_in_flight = 1;
    if (call->is_posted) return;
    calls->waiting++;
    if (!calls->first_waiting) calls->first_waiting = call;
}

/* Count one call less that waits for a slot. The call is the first waiting one, or the caller removes it from the
   list of calls in flight. */
static void stop_waiting(Handle *call) {
    Calls *calls = call->calls;
    calls->waiting--;
    if (calls->first_waiting == call) calls->first_waiting = call->next;
}

/* Remove a call from the list of calls in flight. The caller gets the reference that the list held. */
void unlink_call(Handle *call) {
    Calls *calls = call->calls;
    if (!call->is_posted) stop_waiting(call);
    if (call->previous) call->previous->next = call->next;
    else calls->first = call->next;
    if (call->next) call->next->previous = call->previous;
    else calls->last = call->previous;
    call->previous = call->next = NULL;
    calls->count--;
    calls->relays -= call->relay != NULL;
    call->is_in_flight = 0;
}

static PyObject *flat_list(PyObject *arrays) {
    PyObject *list = PyList_New(PyList_Size(arrays));
    for (Py_ssize_t i = 0; list && i < PyList_Size(arrays); i++) {
        PyObject *each = PyList_GetItem(arrays, i);
        if (each == Py_None) KEEP(each);
        else each = PyArray_Ravel((PyArrayObject *)each, NPY_CORDER);
        if (!each || PyList_SetItem(list, i, each) < 0) Py_CLEAR(list);
    }
    return list;
}

/* Return a call's arrays as a list of flat arrays, one per buffer. */
PyObject *buffers_of(Handle *call, PyObject *arrays) {
    if (PyList_Check(arrays)) return flat_list(arrays);
    if (PyTuple_Check(arrays)) {
        KEEP(arrays); /* keep the arrays if the call ends while Python runs */
        PyObject *made = PyObject_CallFunctionObjArgs(call->calls->flatten, call->steps->kind,
                                                      PyTuple_GetItem(arrays, 0), PyTuple_GetItem(arrays, 1), NULL);
        DROP(arrays);
        return made;
    }
    PyObject *flat = PyArray_Ravel((PyArrayObject *)arrays, NPY_CORDER), *list = flat ? PyList_New(1) : NULL;
    if (!list) return DROP(flat), NULL;
    PyList_SetItem(list, 0, flat);
    return list;
}

/* Return a Python operation with the state of a call. */
PyObject *operation_of(Handle *call, PyObject *given, PyObject *completion) {
    PyObject *arrays = buffers_of(call, given);
    if (!arrays) return NULL;
    PyObject *made = PyObject_CallFunction(call->calls->operation, "KOOOd", (unsigned long long)call->identity,
                                           call->steps->plan, arrays, completion, call->entered);
    DROP(arrays);
    return made;
}

/* Hand over a call in flight to Python, which creates an operation and continues it. */
int hand_over(Handle *call) {
    if (!call->is_in_flight) return 0;
    unlink_call(call);
    if (call->block) return take_member_over(call);
    PyObject *completion = materialize(call),
             *operation = completion ? operation_of(call, call->arrays, completion) : NULL, *done = NULL;
    const Relay *relay = call->relay;
    if (operation && relay)
        done = PyObject_CallMethod(operation, "adopt", "nnnO", relay->put.count, relay->taken.count, relay->copied,
                                   relay->holds ? Py_True : Py_False);
    else if (operation)
        done = PyObject_CallMethod(operation, "adopt", "iO", call->missing, call->is_posted ? Py_True : Py_False);
    relay_close(call);
    DROP(completion);
    DROP(operation);
    Py_CLEAR(call->arrays);
    DROP(call);
    if (!done) return -1;
    DROP(done);
    return 0;
}

/* Check whether all contributions of peers have arrived, without using the interpreter. Return 1 if all have
   arrived, 0 if one is missing, -1 if the call must be handed over to Python. */
int look_at(Handle *call) {
    const Calls *calls = call->calls;
    const Steps *steps = call->steps;
    if (!call->is_posted) return 0;
    if (call->relay) return relay_move(call);
    for (; call->seen < steps->takes_count; call->seen++) {
        const Take *take = steps->takes + call->seen;
        PeerLanes *peer = calls->peers[take->peer];
        if (!peer || !peer->can_look) return -1;
        Head expected = {call->identity, calls->group, steps->fingerprint, (uint64_t)take->nbytes};
        int found = lane_look(peer, take->is_common, slot_of(calls, call->identity, take->first_slot, take->slots),
                              &expected, steps->is_private);
        if (found == DIFFERENT) return -1;
        if (found == MISSING) return call->missing = take->peer, 0;
    }
    return 1;
}

static char *contribution_bytes(const Calls *calls, const Take *take, uint64_t identity) {
    const PeerLanes *peer = calls->peers[take->peer];
    return slot_bytes(take->is_common ? &peer->common_slots : &peer->lane_slots,
                      slot_of(calls, identity, take->first_slot, take->slots), take->nbytes);
}

/* Revoke the group on all ranks because of the pending exception. Return -1 if the exception must also propagate,
   such as KeyboardInterrupt, which is no subclass of Exception. */
int crash(Calls *calls) {
    PyObject *type, *value, *traceback;
    if (!calls->comm) return -1;
    int is_error = PyErr_ExceptionMatches(PyExc_Exception);
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (value && traceback) PyException_SetTraceback(value, traceback);
    PyObject *done = PyObject_CallMethod(calls->comm, "revoke_after_crash", "O", value ? value : Py_None);
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

/* Put a call back into the list of calls in flight, then fail all calls of the group. Takes the caller's reference. */
static int crash_call(Handle *call) {
    Calls *calls = call->calls;
    link_call(call);
    int failed = crash(calls);
    DROP(call);
    return failed;
}

/* Record a successful call in the journal; record the id of an ended keyed call, or of a block's call. */
static int note_end(Handle *call) {
    Calls *calls = call->calls;
    unsigned long long root = call->block ? call->block->root : call->identity;
    if (!call->block && journal_ended(calls, call, seconds()) < 0)
        return -1; /* for a block's call, the flush writes the journal record */
    if (!call->block && call->key == Py_None) return 0;
    PyObject *done = PyObject_CallFunction(calls->remember, "KK", (unsigned long long)call->identity, root);
    DROP(done);
    return done ? 0 : -1;
}

/* Return whether all contributions that have arrived can still be read: a link may have ended, and another link may
   use its lane. */
static int can_read(const Handle *call) {
    for (int i = 0; i < call->steps->takes_count; i++) {
        const PeerLanes *peer = call->calls->peers[call->steps->takes[i].peer];
        if (!peer || !peer->can_look) return 0;
    }
    return 1;
}

/* Return 1 if this rank can post its last contributions. Return 0 if the call is handed over to Python, -1 with an
   exception. */
static int may_complete(Handle *call) {
    Calls *calls = call->calls;
    Steps *steps = call->steps;
    for (int tries = 0; tries < TRIES && call->is_in_flight; tries++) {
        uint64_t asked = calls->asked;
        int postable = steps->last_count ? are_postable(calls, steps->last, steps->last_count, call->identity) : CAN;
        if (postable < 0) return -1;
        if (!call->is_in_flight) return 0;
        if (postable != CAN || !can_read(call)) break;
        if (calls->asked == asked) return 1;
        call->seen = 0;
        if (look_at(call) <= 0) break;
    }
    return hand_over(call);
}

/* Reduce contributions. If a Python function reduces, keep the peers' memory mapped, because the function may run
   code that closes links. */
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
        int postable = calls->comm ? are_postable(calls, steps->last, steps->last_count, call->identity) : CANNOT;
        if (postable < 0) return -1;
        has_changed |= postable != CAN || calls->asked != asked;
    }
    if (!failed && (has_changed || !calls->comm)) {
        PyErr_SetString(PyExc_RuntimeError, "a link was closed while its data was reduced");
        return -1;
    }
    return failed;
}

static npy_intp buffer_nbytes(PyObject *arrays, int buffer, int size) {
    if (PyList_Check(arrays)) return PyArray_NBYTES((PyArrayObject *)PyList_GetItem(arrays, buffer));
    if (!PyTuple_Check(arrays)) return PyArray_NBYTES((PyArrayObject *)arrays);
    return PyArray_NBYTES((PyArrayObject *)PyTuple_GetItem(arrays, 0)) / size;
}

/* End a successful call that is no longer in the list of calls in flight. Takes the caller's reference. */
static int end(Handle *call) {
    Calls *calls = call->calls;
    int failed = calls->comm ? note_end(call) : 0; /* the last post may have closed the group */
    if (failed) failed = crash(calls); /* fail the group with this exception: the call itself has succeeded */
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    int ended = handle_end(call);
    if (call->block && member_ended(call) < 0) ended = -1;
    if (ended < 0) ended = crash(calls);
    if (type) PyErr_Restore(type, value, traceback);
    DROP(call);
    return failed || ended ? -1 : 0;
}

/* Complete a call for which all contributions have arrived: reduce or copy them from their slots, free the slots,
   post the result, and end the call. */
int complete(Handle *call) {
    Calls *calls = call->calls;
    Steps *steps = call->steps;
    if (call->relay) { /* a relay has already used all chunks */
        unlink_call(call);
        relay_close(call);
        return end(call);
    }
    int may = may_complete(call);
    if (may <= 0) return may < 0 ? crash(calls) : 0;
    /* After this, no other code can hand the call over, and this function owns the reference to it. */
    unlink_call(call);
    char *found[steps->takes_count ? steps->takes_count : 1];
    for (int i = 0; i < steps->takes_count; i++) found[i] = contribution_bytes(calls, steps->takes + i, call->identity);
    for (int i = 0; i < steps->copies_count; i++)
        copy_bytes(buffer_bytes(call, steps->copies[i].first), buffer_bytes(call, steps->copies[i].second),
                   buffer_nbytes(call->arrays, steps->copies[i].first, calls->size));
    for (int i = 0; i < steps->moves_count; i++) {
        npy_intp nbytes = steps->takes[steps->moves[i].first].nbytes;
        copy_bytes(buffer_bytes(call, steps->moves[i].second), found[steps->moves[i].first], nbytes);
    }
    if (steps->target >= 0 && fold_safely(call, found) < 0) return crash_call(call);
    for (int i = 0; i < steps->takes_count; i++) {
        const Take *take = steps->takes + i;
        if (!lane_free(calls->peers[take->peer], take->is_common,
                       slot_of(calls, call->identity, take->first_slot, take->slots), calls->group)) {
            PyObject *done = PyObject_CallFunction(calls->overwritten, "i", take->peer);
            DROP(done);
            return crash_call(call);
        }
    }
    if (post_all(call, steps->last, steps->last_count) < 0) return crash_call(call);
    return end(call);
}

/* Check a call in flight, and end it or hand it over if possible. Return 1 if the call has ended or was handed over,
   -1 with an exception. */
int look_once(Handle *call) {
    int found = look_at(call);
    if (!found) return 0;
    return (found > 0 ? complete(call) : hand_over(call)) < 0 ? -1 : 1;
}

/* Start a relay: send and receive all chunks that can be moved now. */
static int begin_relay(Handle *call) {
    Calls *calls = call->calls;
    if (PyDict_SetItem(calls->lookers, (PyObject *)calls, Py_None) < 0) return crash(calls);
    if (relay_poll_soon(call) < 0) return crash(calls);
    calls->deadline = seconds() + BUDGET;
    return call->is_in_flight && look_once(call) < 0 ? -1 : 0;
}

/* Post this rank's contributions to a call. If all contributions of peers have arrived, end the call. */
int begin(Handle *call) {
    if (call->relay) return begin_relay(call);
    if (post_all(call, call->steps->first, call->steps->first_count) < 0) return crash(call->calls);
    int found = call->is_in_flight ? look_at(call) : 0;
    return !found ? 0 : found > 0 ? complete(call) : hand_over(call);
}

/* Post the calls that wait for slots, in order, up to the first call whose slot is still in use. */
static int post_waiting(Calls *calls) {
    Handle *call;
    while ((call = calls->first_waiting)) {
        KEEP(call);
        int ready = is_ready(call), failed = 0;
        if (ready < 0) failed = crash(calls);
        else if (call->is_in_flight && ready == CANNOT) failed = hand_over(call);
        else if (call->is_in_flight && ready == CAN) {
            call->is_posted = 1;
            stop_waiting(call);
            failed = begin(call);
        }
        DROP(call);
        if (failed) return -1;
        if (ready == IN_USE) return 0;
    }
    return 0;
}

/* Complete the oldest calls, because readers of this rank's slots may be waiting for these calls. Then post waiting
   calls. */
int advance(Calls *calls) {
    Handle *call;
    while ((call = calls->first)) {
        KEEP(call);
        int found = look_once(call);
        DROP(call);
        if (found < 0) return -1;
        if (!found) break;
    }
    return post_waiting(calls);
}

/* Check all posted calls, oldest first, and post waiting calls. Return whether any call has made progress, -1 with
   an exception. */
int look_at_all(Calls *calls) {
    uint64_t before = calls->moved;
    int moved = 0;
    Handle *call = calls->first;
    if (calls->relays) calls->deadline = seconds() + BUDGET;
    KEEP(call);
    while (call && call->is_posted) {
        Handle *next = call->next;
        KEEP(next);
        if (call->is_in_flight) {
            int found = look_once(call);
            if (found < 0) {
                DROP(next);
                DROP(call);
                return -1;
            }
            moved |= found;
        }
        DROP(call);
        /* Start again from the first call if a called function has ended or handed over the next one. */
        if (next && !next->is_in_flight) {
            DROP(next);
            next = calls->first;
            KEEP(next);
        }
        call = next;
    }
    DROP(call);
    Py_ssize_t waiting = calls->waiting;
    if (post_waiting(calls) < 0) return -1;
    return moved || calls->waiting != waiting || calls->moved != before;
}
