/* `Handle`, the base class of `Work`. A work with a completion uses the Python reference implementation. C code
   carries out all other works. */
#include "accelerator.h"

/* Seconds without a loop iteration after which an await of an ended operation yields to the event loop. This is
   part of the public contract; aiocoll/engine/polling.py has the same number. */
#define TURN 500e-6

PyObject *reference_await, *reference_done, *reference_result, *reference_exception, *make_completion;

static PyObject *call_reference(PyObject *function, Handle *self) {
    return PyObject_CallFunctionObjArgs(function, (PyObject *)self, NULL);
}

static int Handle_init(Handle *self, PyObject *args, PyObject *kwargs) {
    PyObject *completion;
    if (self->calls) return PyErr_SetString(PyExc_TypeError, "this work is already being carried out"), -1;
    if (!PyArg_ParseTuple(args, "O", &completion)) return -1;
    KEEP(completion);
    SET_REFERENCE(self->completion, completion);
    PyObject *done = PyObject_GetAttrString(completion, "done");
    int is_done = done ? PyObject_IsTrue(done) : -1;
    DROP(done);
    if (is_done < 0) return -1;
    return is_done ? 0 : PyObject_SetAttrString(completion, "handle", (PyObject *)self);
}

static int Handle_traverse(Handle *self, visitproc visit, void *arg) {
    Py_VISIT(TYPE_OF(self));
    Py_VISIT(self->completion);
    Py_VISIT(self->owner);
    Py_VISIT(self->calls);
    Py_VISIT(self->block);
    Py_VISIT(self->steps);
    Py_VISIT(self->arrays);
    Py_VISIT(self->value);
    Py_VISIT(self->key);
    Py_VISIT(self->shape);
    Py_VISIT(self->code);
    Py_VISIT(self->waiters);
    Py_VISIT(self->guard);
    return 0;
}

static int Handle_clear(Handle *self) {
    Py_CLEAR(self->completion);
    Py_CLEAR(self->owner);
    Py_CLEAR(self->calls);
    Py_CLEAR(self->block);
    Py_CLEAR(self->steps);
    Py_CLEAR(self->arrays);
    Py_CLEAR(self->value);
    Py_CLEAR(self->key);
    Py_CLEAR(self->shape);
    Py_CLEAR(self->code);
    Py_CLEAR(self->waiters);
    Py_CLEAR(self->guard);
    return 0;
}

static void Handle_dealloc(Handle *self) {
    PyObject_GC_UnTrack(self);
    relay_close(self);
    Handle_clear(self);
    free_object(self);
}

/* Return whether this is the thread of the group's event loop, in the process in which the group was made. */
static int is_owner(const Calls *calls) {
    return PyThread_get_thread_ident() == calls->thread && calls->forks == forks_of_process;
}

PyObject *completion_of(Handle *self, PyObject *waiters, PyObject *guard) {
    PyObject *seq = self->seq < 0 ? (KEEP(Py_None), Py_None) : PyLong_FromLongLong(self->seq);
    if (!seq) return NULL;
    PyObject *facts = Py_BuildValue("(ONOOdOOi)", self->steps->op, seq, self->key, self->shape, self->limit,
                                    self->value, self->code, self->instruction),
             *made = NULL;
    if (facts && self->block && self->block->recording && !self->is_done) {
        PyObject *arrays = buffers_of(self, self->arrays);
        if (arrays)
            made = PyObject_CallMethod(self->block->recording, "deferred", "OOOOOO", self->steps->plan, arrays, facts,
                                       waiters, guard, (PyObject *)self);
        DROP(arrays);
    } else if (facts) {
        made = PyObject_CallFunction(make_completion, "OOOOOO", self->calls->progress, self->owner, facts, waiters,
                                     guard, self->is_done ? Py_None : (PyObject *)self);
    }
    DROP(facts);
    return made;
}

/* Return the completion of a call. If it has none, Python creates it from the call's state, and the call uses it
   from then on. */
PyObject *materialize(Handle *self) {
    while (!self->completion) {
        if (!self->calls) return PyErr_SetString(PyExc_RuntimeError, "this work was not initialized"), NULL;
        int was_done = self->is_done;
        /* The event loop may run while another thread creates the completion. Awaits that start then must use the
           same list of waiters. */
        if (!was_done && !self->waiters && !(self->waiters = PyList_New(0))) return NULL;
        PyObject *waiters = self->waiters ? self->waiters : Py_None,
                 *made = completion_of(self, waiters, self->guard ? self->guard : Py_None);
        if (!made) return NULL;
        if (self->completion ||
            was_done != self->is_done) { /* another thread has created a completion, or the call has ended */
            DROP(made);
            continue;
        }
        self->completion = made;
        Py_CLEAR(self->waiters);
        Py_CLEAR(self->guard);
    }
    KEEP(self->completion);
    return self->completion;
}

static PyObject *Handle_completion(Handle *self, void *Py_UNUSED(unused)) {
    if (self->is_in_flight) {
        /* Only the event loop's thread may use the engine. Other threads and forked children get a copy that they
           can only read. */
        if (!is_owner(self->calls)) return completion_of(self, Py_None, Py_None);
        if (hand_over(self) < 0) return NULL;
    }
    return materialize(self);
}

/* Handle the success of a call: drop its arrays, and wake the tasks that await the call. */
int handle_end(Handle *self) {
    self->is_done = 1;
    Py_CLEAR(self->arrays);
    if (self->completion) { /* the completion exists already, and another thread may wait for it */
        PyObject *done = PyObject_CallMethod(self->completion, "finish", "O", self->value);
        DROP(done);
        return done ? 0 : -1;
    }
    if (!self->waiters) return 0;
    PyObject *waiters = self->waiters;
    self->waiters = NULL;
    int failed = 0;
    for (Py_ssize_t i = 0; i < PyList_Size(waiters) && !failed; i++) {
        PyObject *waiter = PyList_GetItem(waiters, i), *done = PyObject_CallMethod(waiter, "done", NULL);
        PyObject *set = done == Py_False ? PyObject_CallMethod(waiter, "set_result", "O", Py_None) : NULL;
        failed = !done || (done == Py_False && !set);
        DROP(done);
        DROP(set);
    }
    DROP(waiters);
    return failed ? -1 : 0;
}

/* Cancel the warning about a work that is never awaited: the program awaits the work or reads its outcome. */
int note_await(Handle *self) {
    if (!self->guard) return 0;
    PyObject *guard = self->guard;
    self->guard = NULL;
    PyObject *done = PyObject_CallMethod(guard, "mark_awaited", NULL);
    DROP(guard);
    DROP(done);
    return done ? 0 : -1;
}

/* ---- awaiting */

/* The iterator of an `await`: it suspends on a future, yields once to the event loop, or returns immediately. */
typedef struct {
    PyObject_HEAD Handle *work;
    PyObject *future, *inner;  /* the future on which the await suspends, and the future's iterator */
    char yields, is_reference; /* is_reference: `inner` is the generator of the Python implementation, used after
                                  a hand-over */
} Iteration;

static int turn_is_due(Calls *calls, double now) {
    double *turn = calls->turn.buf;
    if (now - *turn < TURN) return 0;
    *turn = now;
    return 1;
}

/* Run the callbacks that are due before this loop iteration ends. */
static int settle(Calls *calls) {
    if (!PyList_Size(calls->due)) return 0;
    PyObject *done = PyObject_CallMethod(calls->runtime, "settle", NULL);
    DROP(done);
    return done ? 0 : -1;
}

static int is_here(Calls *calls) {
    if (!is_owner(calls) || !calls->comm) return 0;
    PyObject *running = PyObject_CallNoArgs(calls->is_running);
    DROP(running);
    return running ? running == Py_True : -1;
}

static int may_poll(Calls *calls) {
    if (calls->spin <= 0) return 0;
    PyObject *spun = PyObject_GetAttr(calls->polling, name_spun);
    DROP(spun);
    return spun ? spun == Py_False : -1;
}

static PyObject *Handle_await(Handle *self) {
    if (self->completion || !self->calls) return call_reference(reference_await, self);
    if (self->block && !self->is_in_flight) { /* a recorded call starts together with its block */
        PyObject *completion = materialize(self);
        DROP(completion);
        return completion ? call_reference(reference_await, self) : NULL;
    }
    if (note_await(self) < 0) return NULL;
    if (!self->is_done) {
        int here = is_here(self->calls);
        if (here < 0) return NULL;
        if (!here) return call_reference(reference_await, self); /* Python raises the error */
        int polls = may_poll(self->calls);
        if (polls < 0 || (polls && poll_for(self) < 0)) return NULL;
        if (self->completion) return call_reference(reference_await, self);
    }
    Iteration *iteration = (Iteration *)((allocfunc)PyType_GetSlot(Iteration_type, Py_tp_alloc))(Iteration_type, 0);
    if (!iteration) return NULL;
    KEEP(self), iteration->work = self;
    if (self->is_done) {
        if (settle(self->calls) < 0) {
            DROP(iteration);
            return NULL;
        }
        iteration->yields = (char)turn_is_due(self->calls, seconds());
    }
    return (PyObject *)iteration;
}

static PyObject *outcome(Handle *self) {
    if (self->completion) return call_reference(reference_result, self);
    KEEP(self->value);
    return self->value;
}

static PySendResult Iteration_send(Iteration *self, PyObject *argument, PyObject **result) {
    Handle *work = self->work;
    *result = NULL;
    if (self->yields) {
        self->yields = 0;
        KEEP(Py_None);
        *result = Py_None;
        return PYGEN_NEXT;
    }
    if (!self->inner && !work->is_done && work->completion) { /* handed over to Python during the await */
        if (!(self->inner = call_reference(reference_await, work))) return PYGEN_ERROR;
        self->is_reference = 1;
    } else if (!self->inner && !work->is_done) {
        PyObject *future = PyObject_CallNoArgs(work->calls->create_future);
        if (!future) return PYGEN_ERROR;
        if ((!work->waiters && !(work->waiters = PyList_New(0))) || PyList_Append(work->waiters, future) < 0) {
            DROP(future);
            return PYGEN_ERROR;
        }
        self->future = future;
        self->inner = PyObject_CallMethod(future, "__await__", NULL);
        if (!self->inner) return PYGEN_ERROR;
    }
    if (self->inner) {
        PySendResult sent = PyIter_Send(self->inner, argument, result);
        if (sent != PYGEN_RETURN) return sent;
        Py_CLEAR(self->inner);
        Py_CLEAR(self->future);
        if (self->is_reference) return PYGEN_RETURN;
        Py_CLEAR(*result);
    }
    *result = outcome(work);
    return *result ? PYGEN_RETURN : PYGEN_ERROR;
}

static PyObject *Iteration_next(Iteration *self) {
    PyObject *value, *stop;
    PySendResult sent = Iteration_send(self, Py_None, &value);
    if (sent != PYGEN_RETURN) return value;
    stop = PyObject_CallFunctionObjArgs(PyExc_StopIteration, value, NULL);
    DROP(value);
    if (stop) {
        PyErr_SetObject(PyExc_StopIteration, stop);
        DROP(stop);
    }
    return NULL;
}

static int Iteration_traverse(Iteration *self, visitproc visit, void *arg) {
    Py_VISIT(TYPE_OF(self));
    Py_VISIT(self->work);
    Py_VISIT(self->future);
    Py_VISIT(self->inner);
    return 0;
}

/* Remove the future of a cancelled or deleted await from the work. */
static void remove_future(Iteration *self) {
    Handle *work = self->work;
    PyObject *future = self->future, *type, *value, *traceback;
    self->future = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    if (work->completion) {
        PyObject *done = PyObject_CallMethod(work->completion, "remove_waiter", "O", future);
        if (!done) PyErr_WriteUnraisable(work->completion);
        DROP(done);
    } else {
        for (Py_ssize_t i = work->waiters ? PyList_Size(work->waiters) - 1 : -1; i >= 0; i--)
            if (PyList_GetItem(work->waiters, i) == future && PyList_SetSlice(work->waiters, i, i + 1, NULL) < 0)
                PyErr_Clear();
    }
    PyErr_Restore(type, value, traceback);
    DROP(future);
}

static int Iteration_clear(Iteration *self) {
    if (self->work && self->future) remove_future(self);
    Py_CLEAR(self->work);
    Py_CLEAR(self->inner);
    return 0;
}

static void Iteration_dealloc(Iteration *self) {
    PyObject_GC_UnTrack(self);
    Iteration_clear(self);
    free_object(self);
}

static PyType_Slot Iteration_slots[] = {{Py_tp_doc, "One await of a work."},  {Py_tp_iter, PyObject_SelfIter},
                                        {Py_tp_iternext, Iteration_next},     {Py_am_send, Iteration_send},
                                        {Py_tp_traverse, Iteration_traverse}, {Py_tp_clear, Iteration_clear},
                                        {Py_tp_dealloc, Iteration_dealloc},   {0}};
PyType_Spec Iteration_spec = {"aiocoll.native._core.Iteration", sizeof(Iteration), 0,
                              Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, Iteration_slots};

/* ---- methods for users */

static PyObject *Handle_done(Handle *self, PyObject *Py_UNUSED(unused)) {
    if (self->completion) return call_reference(reference_done, self);
    if (self->is_done && note_await(self) < 0) return NULL;
    return PyBool_FromLong(self->is_done);
}

static PyObject *Handle_result(Handle *self, PyObject *Py_UNUSED(unused)) {
    if (self->completion || !self->is_done) return call_reference(reference_result, self);
    if (note_await(self) < 0) return NULL;
    KEEP(self->value);
    return self->value;
}

static PyObject *Handle_exception(Handle *self, PyObject *Py_UNUSED(unused)) {
    if (self->completion || !self->is_done) return call_reference(reference_exception, self);
    if (note_await(self) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef Handle_methods[] = {
    {"done", (PyCFunction)Handle_done, METH_NOARGS, "done($self, /)\n--\n\nReturn whether the operation has ended."},
    {"result", (PyCFunction)Handle_result, METH_NOARGS,
     "result($self, /)\n--\n\nReturn the result of an operation that has ended."},
    {"exception", (PyCFunction)Handle_exception, METH_NOARGS,
     "exception($self, /)\n--\n\nReturn the error of an operation that has ended."},
    {0}};
static PyGetSetDef Handle_getset[] = {{"_completion", (getter)Handle_completion, NULL,
                                       "The completion; a call in flight is handed over to Python.", NULL},
                                      {0}};
static PyType_Slot Handle_slots[] = {{Py_tp_doc, "Handle(completion, /)\n--\n\nThe base class of works."},
                                     {Py_tp_new, PyType_GenericNew},
                                     {Py_tp_init, Handle_init},
                                     {Py_tp_traverse, Handle_traverse},
                                     {Py_tp_clear, Handle_clear},
                                     {Py_tp_dealloc, Handle_dealloc},
                                     {Py_tp_methods, Handle_methods},
                                     {Py_tp_getset, Handle_getset},
                                     {Py_am_await, Handle_await},
                                     {0}};
PyType_Spec Handle_spec = {"aiocoll.native._core.Handle", sizeof(Handle), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, Handle_slots};
