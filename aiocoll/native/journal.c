/* Journal of a group: records and counters of successful calls, in arrays that Python code shares.

   aiocoll/engine/journal.py describes the arrays. If C code does not know a value (the row of a counter, or a longer
   ring), the Python journal provides it. */
#include "accelerator.h"

#include <math.h>

enum {
    RECORD_NBYTES = 56,
    NBYTES_MOVED = 0,
    SECONDS = 2,
    BUCKET = 3,
    SHIFT = 24,
    BUCKETS = 64,
    TIMES = 0,
    WAITED = 1,
    ROW = BUCKET + BUCKETS
};
enum { COUNT = 0, GENERATION = 1, SIZE = 2 }; /* indices in the state array of a journal table */

typedef struct {
    uint64_t identity;
    int64_t number;
    double entered, ended, started;
    int64_t seq;
    int32_t peer, instruction;
} Record;
_Static_assert(sizeof(Record) == RECORD_NBYTES, "a record has 56 bytes");

static int64_t state_of(const Py_buffer *state, int index) { return ((int64_t *)state->buf)[index]; }

static int view_attribute(PyObject *object, const char *name, Py_buffer *view, int flags) {
    PyObject *found = PyObject_GetAttrString(object, name);
    if (!found) return -1;
    PyBuffer_Release(view);
    int failed = PyObject_GetBuffer(found, view, flags);
    DROP(found);
    return failed;
}

/* Get a new buffer of a journal table if Python has replaced the table's memory. */
static int refresh(PyObject *owner, const char *name, Py_buffer *memory, const Py_buffer *state, int64_t *generation) {
    if (state_of(state, GENERATION) == *generation) return 0;
    PyObject *table = PyObject_GetAttrString(owner, name);
    if (!table) return -1;
    int failed = view_attribute(table, "memory", memory, PyBUF_WRITABLE);
    DROP(table);
    *generation = state_of(state, GENERATION);
    return failed;
}

static int open_table(PyObject *journal, const char *name, Py_buffer *memory, Py_buffer *state, int64_t *generation) {
    PyObject *table = PyObject_GetAttrString(journal, name);
    int failed = !table || view_attribute(table, "state", state, PyBUF_WRITABLE) < 0;
    DROP(table);
    *generation = -1;
    return failed || refresh(journal, name, memory, state, generation) < 0 ? -1 : 0;
}

int journal_open(JournalView *view, PyObject *journal, int size) {
    KEEP(journal);
    view->journal = journal;
    if (!(view->ring = PyObject_GetAttrString(journal, "collectives"))) return -1;
    if (!(view->objects = PyObject_GetAttrString(view->ring, "objects"))) return -1;
    if (open_table(journal, "collectives", &view->records, &view->ring_state, &view->records_generation) < 0) return -1;
    if (open_table(journal, "counters", &view->counters, &view->counters_state, &view->counters_generation) < 0)
        return -1;
    if (open_table(journal, "waits", &view->waits, &view->waits_state, &view->waits_generation) < 0) return -1;
    if (view_attribute(journal, "due", &view->due, PyBUF_WRITABLE) < 0) return -1;
    const Py_buffer *states[] = {&view->ring_state, &view->counters_state, &view->waits_state};
    int fits = view->due.len >= (Py_ssize_t)sizeof(double) && PyList_Check(view->objects);
    for (int i = 0; i < 3; i++) fits = fits && states[i]->len >= (SIZE + 1) * (Py_ssize_t)sizeof(int64_t);
    if (!fits || state_of(&view->ring_state, SIZE) < 1)
        return PyErr_SetString(PyExc_ValueError, "the journal has an invalid layout"), -1;
    PyObject *counts = PyObject_GetAttrString(journal, "counts");
    if (!counts) return -1;
    view->counts = PyObject_IsTrue(counts);
    DROP(counts);
    if (!(view->wait_rows = PyMem_Malloc(size * sizeof(npy_intp)))) return PyErr_NoMemory(), -1;
    for (int i = 0; i < size; i++) view->wait_rows[i] = -1;
    return 0;
}

void journal_close(JournalView *view) {
    Py_buffer *views[] = {&view->records,        &view->counters,    &view->waits, &view->ring_state,
                          &view->counters_state, &view->waits_state, &view->due};
    for (size_t i = 0; i < sizeof views / sizeof *views; i++) PyBuffer_Release(views[i]);
    Py_CLEAR(view->journal);
    Py_CLEAR(view->ring);
    Py_CLEAR(view->objects);
    PyMem_Free(view->wait_rows);
    view->wait_rows = NULL;
}

static int raise_no_room(void) {
    PyErr_SetString(PyExc_RuntimeError, "the journal has less room than its state declares");
    return -1;
}

static int write_record(JournalView *view, Handle *call, double now) {
    int64_t *state = view->ring_state.buf, number = ++state[COUNT];
    Py_ssize_t index = (Py_ssize_t)(number % state[SIZE]);
    if ((index + 1) * RECORD_NBYTES > view->records.len || state[GENERATION] != view->records_generation) {
        if (refresh(view->journal, "collectives", &view->records, &view->ring_state, &view->records_generation) < 0)
            return -1;
        if ((index + 1) * RECORD_NBYTES > view->records.len) {
            PyObject *grown = PyObject_CallMethod(view->ring, "grow", NULL);
            if (!grown) return -1;
            DROP(grown);
            if (refresh(view->journal, "collectives", &view->records, &view->ring_state, &view->records_generation) < 0)
                return -1;
        }
        if ((index + 1) * RECORD_NBYTES > view->records.len) return raise_no_room();
    }
    PyObject *objects = PyTuple_New(6), *count = PyLong_FromLongLong(number);
    if (!objects || !count) return DROP(objects), DROP(count), -1;
    PyObject *others[] = {call->steps->signature, call->shape, call->key, call->code, Py_None};
    PyTuple_SetItem(objects, 0, count);
    for (int i = 0; i < 5; i++) KEEP(others[i]), PyTuple_SetItem(objects, i + 1, others[i]);
    if (PyList_SetItem(view->objects, index, objects) < 0) return -1;
    ((Record *)view->records.buf)[index] =
        (Record){call->identity, number, call->entered, now, NAN, call->seq, -1, call->instruction};
    return 0;
}

/* Get the row of counters for calls with this plan and shape from the Python journal. */
static int find_counters(Calls *calls, Handle *call) {
    Steps *steps = call->steps;
    PyObject *found = PyObject_CallMethod(calls->journal.journal, "row_of_plan", "OO", steps->plan, call->shape);
    if (!found) return -1;
    int parsed = PyArg_ParseTuple(found, "nd", &steps->row, &steps->nbytes);
    DROP(found);
    steps->epoch = calls->epoch;
    return parsed ? 0 : -1;
}

static int count_wait(JournalView *view, int peer, double took, double now) {
    npy_intp *row = view->wait_rows + peer;
    if (*row < 0 || now >= *(double *)view->due.buf) {
        PyObject *found = PyObject_CallMethod(view->journal, "wait_row", "id", peer, now);
        if (!found) return -1;
        *row = PyLong_AsSsize_t(found);
        DROP(found);
        if (*row < 0) return -1;
    }
    if (refresh(view->journal, "waits", &view->waits, &view->waits_state, &view->waits_generation) < 0) return -1;
    if ((*row + WAITED + 1) * (Py_ssize_t)sizeof(double) > view->waits.len) return raise_no_room();
    double *waits = (double *)view->waits.buf + *row;
    waits[TIMES] += 1.0;
    waits[WAITED] += took;
    return 0;
}

int journal_ended(Calls *calls, Handle *call, double now) {
    JournalView *view = &calls->journal;
    Steps *steps = call->steps;
    if (write_record(view, call, now) < 0) return -1;
    if (!view->counts) return 0;
    if (steps->epoch != calls->epoch && find_counters(calls, call) < 0) return -1;
    if (refresh(view->journal, "counters", &view->counters, &view->counters_state, &view->counters_generation) < 0)
        return -1;
    if (steps->row < 0 || (steps->row + ROW) * (Py_ssize_t)sizeof(double) > view->counters.len) return raise_no_room();
    double took = now - call->entered, *counters = (double *)view->counters.buf + steps->row;
    int exponent;
    frexp(took + 0x1p-24, &exponent);
    counters[NBYTES_MOVED] += steps->nbytes;
    counters[SECONDS] += took;
    counters[BUCKET + SHIFT + exponent] += 1.0;
    return call->missing >= 0 ? count_wait(view, call->missing, took, now) : 0;
}
