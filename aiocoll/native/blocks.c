/* Blocks: calls of a coalescing block. C code records them, and starts them as members of the block's flush.

   A recorded call is a work that has not started. It has no completion until Python requests one, which the block then
   creates. At the end of the block, Python decides which calls are not fused, and numbers the flush. C code starts
   these calls as children of the flush. `left` counts the calls that have not ended. The last call to end, or to be
   handed over to Python, reports to the flush. If C code cannot start a call, Python starts the call with the same id.
   */
#include "accelerator.h"

#include <math.h>
#include <stdlib.h>

/* Create the block that records calls into the list `members` of the Python object `recording`. */
PyObject *block_of(Calls *calls, PyObject *recording) {
    PyObject *members = PyObject_GetAttrString(recording, "members");
    Block *block = members && PyList_Check(members)
                       ? (Block *)((allocfunc)PyType_GetSlot(Block_type, Py_tp_alloc))(Block_type, 0)
                       : NULL;
    if (!block) {
        if (members && !PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "members must be a list");
        DROP(members);
        return NULL;
    }
    KEEP(calls), block->calls = calls;
    KEEP(recording), block->recording = recording;
    block->members = members;
    block->limit = INFINITY;
    return (PyObject *)block;
}

/* Return the active coalescing block if it belongs to this group and C code records its calls; otherwise NULL
   without an exception. */
Block *block_here(Calls *calls) {
    PyObject *scope = is_true(owner_of(calls), name_closed) ? NULL : PyObject_CallNoArgs(calls->scope);
    PyObject *found = NULL;
    if (scope && scope != Py_None) {
        PyObject *group = PyObject_GetAttr(scope, name_group);
        PyObject *interceptor = group == owner_of(calls) ? PyObject_GetAttr(scope, name_interceptor) : NULL;
        if (interceptor && interceptor != Py_None) found = PyObject_GetAttr(interceptor, name_native);
        DROP(interceptor);
        DROP(group);
    }
    DROP(scope);
    if (!found || (TYPE_OF(found) == Block_type && ((Block *)found)->calls == calls)) return (Block *)found;
    DROP(found);
    return NULL;
}

/* Record a call, which starts at the end of its block. Return NULL without an exception if Python must record the
   call. */
Handle *record(Block *block, Steps *steps, PyObject *arrays, PyObject *shape, PyObject *value, double limit) {
    Calls *calls = block->calls;
    if (!block->members || !steps->is_small || (steps->target >= 0 && !steps->loop)) return NULL;
    Handle *call = make_call(calls, steps, arrays, shape, value, limit, Py_None);
    if (!call) return NULL;
    KEEP(block), call->block = block;
    call->seq = -1;
    if (find_call_site(calls, call) < 0 || PyList_Append(block->members, (PyObject *)call) < 0) {
        DROP(call);
        return NULL;
    }
    if (limit < block->limit) block->limit = limit;
    return call;
}

/* Return the plan of each member that C code has recorded, and None for each other member. */
static PyObject *Block_plans(Block *self, PyObject *members) {
    if (!PyList_Check(members)) return PyErr_SetString(PyExc_TypeError, "members must be a list"), NULL;
    Py_ssize_t count = PyList_Size(members);
    PyObject *plans = PyList_New(count);
    for (Py_ssize_t i = 0; plans && i < count; i++) {
        PyObject *member = PyList_GetItem(members, i);
        int is_here = PyObject_TypeCheck(member, Handle_type) && ((Handle *)member)->steps;
        PyObject *plan = is_here ? ((Handle *)member)->steps->plan : Py_None;
        KEEP(plan);
        PyList_SetItem(plans, i, plan);
    }
    return plans;
}

/* ---- memory */

typedef struct {
    const char *start, *end;
    Py_ssize_t member;
} Span;
typedef struct {
    Span *spans;
    Py_ssize_t count, room;
} Spans;

static int add_span(Spans *all, PyObject *array, Py_ssize_t member) {
    if (array == Py_None) return 1;
    if (!PyArray_Check(array)) return 0;
    npy_intp nbytes = PyArray_NBYTES((PyArrayObject *)array);
    if (!nbytes) return 1;
    if (all->count == all->room) {
        Py_ssize_t room = all->room ? 2 * all->room : 64;
        Span *spans = PyMem_Realloc(all->spans, room * sizeof *spans);
        if (!spans) return PyErr_NoMemory(), -1;
        all->spans = spans, all->room = room;
    }
    const char *start = PyArray_BYTES((PyArrayObject *)array);
    all->spans[all->count++] = (Span){start, start + nbytes, member};
    return 1;
}

/* Add the memory ranges of a member's arrays to `all`. Return 0 if C code does not know the arrays, -1 with an
   exception. */
static int add_spans(Spans *all, PyObject *member, Py_ssize_t number) {
    PyObject *arrays;
    if (PyObject_TypeCheck(member, Handle_type)) {
        arrays = ((Handle *)member)->arrays;
        if (!arrays) return 0;
        KEEP(arrays);
    } else {
        PyObject *plan = PyObject_GetAttrString(member, "plan");
        arrays = plan && plan != Py_None ? PyObject_GetAttrString(member, "arrays") : NULL;
        DROP(plan);
        if (!arrays) return PyErr_Occurred() ? -1 : 0;
    }
    int added = 1;
    if (PyList_Check(arrays))
        for (Py_ssize_t i = 0; added > 0 && i < PyList_Size(arrays); i++)
            added = add_span(all, PyList_GetItem(arrays, i), number);
    else if (PyTuple_Check(arrays))
        for (Py_ssize_t i = 0; added > 0 && i < PyTuple_Size(arrays); i++)
            added = add_span(all, PyTuple_GetItem(arrays, i), number);
    else added = add_span(all, arrays, number);
    DROP(arrays);
    return added;
}

static int compare_spans(const void *one, const void *two) {
    const Span *a = one, *b = two;
    return (a->start > b->start) - (a->start < b->start);
}

static int are_disjoint(const Spans *all) {
    const Span *reach = all->spans;
    for (const Span *each = all->spans; each < all->spans + all->count; each++) {
        if (each->start < reach->end && each->member != reach->member) return 0;
        if (each->end > reach->end) reach = each;
    }
    return 1;
}

static PyObject *Block_are_disjoint(Block *self, PyObject *members) {
    Spans all = {0};
    int known = PyList_Check(members);
    for (Py_ssize_t i = 0; known > 0 && i < PyList_Size(members); i++)
        known = add_spans(&all, PyList_GetItem(members, i), i);
    if (known > 0 && all.count) {
        qsort(all.spans, all.count, sizeof *all.spans, compare_spans);
        known = are_disjoint(&all);
    }
    PyMem_Free(all.spans);
    return known < 0 ? NULL : PyBool_FromLong(known);
}

/* ---- in flight */

/* Record that one call has ended, or that all calls have been started. Report to the flush when few or no calls are
   left; if `is_deferred`, report in the next loop iteration. */
static int one_ended(Block *block, int missing, int is_deferred) {
    PyObject *flush = block->flush, *done = NULL;
    if (--block->left > block->low || !flush) return 0;
    if (block->left) {
        block->low = 0;
        KEEP(flush);
        done = PyObject_CallMethod(flush, is_deferred ? "start_more_later" : "start_more", NULL);
    } else {
        block->flush = NULL;
        Py_CLEAR(block->recording);
        done = PyObject_CallMethod(flush, is_deferred ? "on_singles_ended_later" : "on_singles_ended", "i", missing);
    }
    DROP(flush);
    DROP(done);
    return done ? 0 : -1;
}

static int leave_block(Handle *call, int is_deferred) {
    Block *block = call->block;
    call->block = NULL;
    int failed = one_ended(block, call->missing, is_deferred);
    DROP(block);
    return failed;
}

/* Handle the success of a call that belongs to a block. */
int member_ended(Handle *call) { return leave_block(call, 0); }

/* Hand over a block's call to Python. The call is no longer in the list of calls in flight. Takes the caller's
   reference. */
int take_member_over(Handle *call) {
    Block *block = call->block;
    PyObject *completion = materialize(call), *arrays = completion ? buffers_of(call, call->arrays) : NULL;
    PyObject *done = NULL;
    if (arrays && block->flush)
        done = PyObject_CallMethod(block->flush, "take_over", "KOOOdiO", (unsigned long long)call->identity,
                                   call->steps->plan, arrays, completion, call->entered, call->missing,
                                   call->is_posted ? Py_True : Py_False);
    int failed = (arrays && !block->flush) || done ? 0 : -1;
    DROP(completion);
    DROP(arrays);
    DROP(done);
    Py_CLEAR(call->arrays);
    /* Report in the next loop iteration: the caller may be iterating over calls in flight or unread posts, so no
       call may start or end now. */
    if (!failed) failed = leave_block(call, 1);
    DROP(call);
    return failed;
}

/* begin(flush, root, first, is_ordered): prepare to start the block's members, as children of the operation `flush`. */
static PyObject *Block_begin(Block *self, PyObject *args) {
    PyObject *flush;
    unsigned long long root, first;
    int is_ordered;
    if (!PyArg_ParseTuple(args, "OKKp", &flush, &root, &first, &is_ordered)) return NULL;
    if (self->flush || !self->recording)
        return PyErr_SetString(PyExc_RuntimeError, "this block has already begun"), NULL;
    KEEP(flush), self->flush = flush;
    Py_CLEAR(self->members);
    self->root = root;
    self->first = first;
    self->is_ordered = is_ordered;
    self->left = 1;
    Py_RETURN_NONE;
}

/* Return a call for the block's member; NULL without an exception if C code cannot carry the call out. */
static Handle *call_of(Block *block, Steps *steps, PyObject *member) {
    if (PyObject_TypeCheck(member, Handle_type)) {
        Handle *call = (Handle *)member;
        if (call->block != block || call->is_done || !call->arrays) return NULL;
        KEEP(call), KEEP(steps);
        SET_REFERENCE(call->steps, steps);
        return call;
    }
    PyObject *arrays = PyObject_GetAttrString(member, "arrays"),
             *value = arrays && are_arrays_right(steps, arrays) ? PyObject_GetAttrString(member, "value") : NULL;
    Handle *call = value ? make_call(block->calls, steps, arrays, Py_None, value, 0, Py_None) : NULL;
    DROP(arrays);
    DROP(value);
    if (!call) return NULL;
    KEEP(block), call->block = block;
    KEEP(member), call->completion = member;
    call->seq = -1;
    return call;
}

/* Start a member of the block. Return 0 if Python must start the member (nothing is posted then), -1 with an
   exception. */
static int start_member(Block *block, PyObject *plan, PyObject *member, uint64_t identity) {
    Calls *calls = block->calls;
    if (!calls->comm || !is_quiet(calls)) return 0;
    Steps *steps = steps_of(calls, plan);
    /* Leave a member that is a relay to Python, because only `start` opens relays. */
    Handle *call = steps && !steps->chunk ? call_of(block, steps, member) : NULL;
    DROP(steps);
    if (!call) return PyErr_Occurred() ? -1 : 0;
    call->identity = identity;
    int ready = is_ready(call);
    if (ready > 0) {
        block->left++;
        if (launch(call, ready) < 0) ready = -1;
    }
    DROP(call);
    return ready;
}

/* start(plans, members, begin, end): start the members with indices from `begin` to `end` that have a plan. */
static PyObject *Block_start(Block *self, PyObject *args) {
    PyObject *plans, *members;
    Py_ssize_t begin, end;
    if (!PyArg_ParseTuple(args, "O!O!nn", &PyTuple_Type, &plans, &PyList_Type, &members, &begin, &end)) return NULL;
    for (Py_ssize_t i = begin; i < end && i < PyTuple_Size(plans) && i < PyList_Size(members) && self->flush; i++) {
        PyObject *plan = PyTuple_GetItem(plans, i), *member = PyList_GetItem(members, i);
        if (plan == Py_None) continue;
        KEEP(member);
        int started = start_member(self, plan, member, self->first + i);
        DROP(member);
        if (started < 0) return NULL;
        if (started || !self->flush) continue;
        PyObject *done =
            PyObject_CallMethod(self->flush, "start_single", "nK", i, (unsigned long long)(self->first + i));
        if (!done) return NULL;
        DROP(done);
    }
    Py_RETURN_NONE;
}

/* pause(low): let the flush resume when at most `low` calls are in flight; return False if no more are in flight
   now. */
static PyObject *Block_pause(Block *self, PyObject *low) {
    Py_ssize_t most = PyLong_AsSsize_t(low);
    if (most == -1 && PyErr_Occurred()) return NULL;
    self->low = self->left > most + 1 ? most + 1 : 0;
    return PyBool_FromLong(self->low != 0);
}

static PyObject *Block_end(Block *self, PyObject *Py_UNUSED(unused)) {
    if (self->flush && one_ended(self, NO_PEER, 0) < 0) return NULL;
    Py_RETURN_NONE;
}

static int Block_traverse(Block *self, visitproc visit, void *arg) {
    Py_VISIT(TYPE_OF(self));
    Py_VISIT(self->calls);
    Py_VISIT(self->recording);
    Py_VISIT(self->members);
    Py_VISIT(self->flush);
    return 0;
}

static int Block_clear(Block *self) {
    Py_CLEAR(self->recording);
    Py_CLEAR(self->members);
    Py_CLEAR(self->flush);
    return 0;
}

static PyObject *Block_close(Block *self, PyObject *Py_UNUSED(unused)) {
    Py_CLEAR(self->flush);
    Py_RETURN_NONE;
}

static void Block_dealloc(Block *self) {
    PyObject_GC_UnTrack(self);
    Block_clear(self);
    DROP(self->calls);
    free_object(self);
}

static PyMethodDef Block_methods[] = {
    {"plans", (PyCFunction)Block_plans, METH_O,
     "Return the plans of members that were recorded here, with None for other members."},
    {"are_disjoint", (PyCFunction)Block_are_disjoint, METH_O,
     "Return whether it is certain that no two members share memory."},
    {"begin", (PyCFunction)Block_begin, METH_VARARGS,
     "Start the phase in which members start, as children of a flush."},
    {"start", (PyCFunction)Block_start, METH_VARARGS, "Start some of the members."},
    {"pause", (PyCFunction)Block_pause, METH_O,
     "Resume the flush when at most `low` calls are in flight; return False if that is already so."},
    {"end", (PyCFunction)Block_end, METH_NOARGS, "Record that all members have started."},
    {"close", (PyCFunction)Block_close, METH_NOARGS, "Drop the flush, which has failed."},
    {0}};
static PyMemberDef Block_attributes[] = {
    {"limit", T_DOUBLE, offsetof(Block, limit), READONLY, "The smallest timeout of the calls, in seconds."}, {0}};
static PyType_Slot Block_slots[] = {{Py_tp_doc, "Calls of a coalescing block that are recorded in C."},
                                    {Py_tp_traverse, Block_traverse},
                                    {Py_tp_clear, Block_clear},
                                    {Py_tp_dealloc, Block_dealloc},
                                    {Py_tp_methods, Block_methods},
                                    {Py_tp_members, Block_attributes},
                                    {0}};
PyType_Spec Block_spec = {"aiocoll.native._core.Block", sizeof(Block), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, Block_slots};
