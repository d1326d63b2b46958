/* Steps: one rank's actions in a collective of one round, and its reduction.

   The content is that of Python's `Round`, with offsets in bytes. Reductions run the inner loops of NumPy's own ufuncs
   on the contributions in place, in rank order. So results have the same bits as in the Python implementation. If
   NumPy has no such loop (half precision, averages), the Python kernel reduces. */
#include "accelerator.h"

#include <math.h>

#define ITEM(tuple, index) PyTuple_GetItem(tuple, index)

static void *rows(PyObject *tuple, int *count, size_t size) {
    *count = (int)PyTuple_Size(tuple);
    void *made = PyMem_Calloc(*count ? *count : 1, size);
    if (!made) PyErr_NoMemory();
    return made;
}

/* Record that a buffer must have at least `nbytes` bytes; return -1 with an exception if the buffer does not exist. */
static int need(Steps *steps, int buffer, npy_intp nbytes) {
    if (!nbytes) return 0; /* a buffer without data may be missing */
    if (buffer < 0 || buffer >= steps->buffers_count) {
        PyErr_Format(PyExc_ValueError, "buffer %d does not exist", buffer);
        return -1;
    }
    if (nbytes > steps->needed[buffer]) steps->needed[buffer] = nbytes;
    return 0;
}

/* Raise ValueError and return 1 if the slots that a contribution may take are out of range or of two sizes. */
static int are_slots_wrong(Py_ssize_t nbytes, uint32_t first_slot, uint32_t slots) {
    uint32_t end = first_slot < LAYOUT_SMALL_SLOTS ? LAYOUT_SMALL_SLOTS : LAYOUT_SLOTS;
    if (nbytes >= 0 && slots && first_slot < end && slots <= end - first_slot) return 0;
    PyErr_SetString(PyExc_ValueError, "the slots of a contribution are out of range");
    return 1;
}

static int contributions_from(PyObject *tuple, Steps *steps, int size, Contribution **made, int *count) {
    if (!(*made = rows(tuple, count, sizeof(Contribution)))) return -1;
    for (int i = 0; i < *count; i++) {
        Contribution *each = *made + i;
        PyObject *readers;
        Py_ssize_t nbytes;
        if (!PyArg_ParseTuple(ITEM(tuple, i), "inO!iII", &each->buffer, &nbytes, &PyTuple_Type, &readers,
                              &each->is_common, &each->first_slot, &each->slots))
            return -1;
        each->nbytes = nbytes;
        if (are_slots_wrong(nbytes, each->first_slot, each->slots)) return -1;
        if (need(steps, each->buffer, nbytes) < 0) return -1;
        if (!(each->readers = rows(readers, &each->readers_count, sizeof(int)))) return -1;
        if (!each->readers_count || (!each->is_common && each->readers_count > 1)) {
            PyErr_SetString(PyExc_ValueError,
                            "a contribution must have a reader, and outside of the common lane only one");
            return -1;
        }
        for (int n = 0; n < each->readers_count; n++) {
            long reader = PyLong_AsLong(ITEM(readers, n));
            if (reader < 0 || reader >= size) {
                if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a reader is not a rank of the group");
                return -1;
            }
            each->readers[n] = (int)reader;
        }
    }
    return 0;
}

static int takes_from(PyObject *tuple, Steps *steps, int size) {
    if (!(steps->takes = rows(tuple, &steps->takes_count, sizeof(Take)))) return -1;
    for (int i = 0; i < steps->takes_count; i++) {
        Take *take = steps->takes + i;
        Py_ssize_t nbytes, elements;
        if (!PyArg_ParseTuple(ITEM(tuple, i), "inniII", &take->peer, &nbytes, &elements, &take->is_common,
                              &take->first_slot, &take->slots))
            return -1;
        take->nbytes = nbytes;
        if (are_slots_wrong(nbytes, take->first_slot, take->slots)) return -1;
        if (take->peer < 0 || take->peer >= size) {
            PyErr_SetString(PyExc_ValueError, "the peer of a contribution is not a rank of the group");
            return -1;
        }
    }
    return 0;
}

static int pairs_from(PyObject *tuple, Pair **made, int *count) {
    if (!(*made = rows(tuple, count, sizeof(Pair)))) return -1;
    for (int i = 0; i < *count; i++)
        if (!PyArg_ParseTuple(ITEM(tuple, i), "ii", &(*made)[i].first, &(*made)[i].second)) return -1;
    return 0;
}

/* Check the indices of buffers and contributions, and that all inputs of the reduction have the same length. */
static int check(Steps *steps) {
    for (int i = 0; i < steps->copies_count; i++)
        if (need(steps, steps->copies[i].first, 1) < 0 || need(steps, steps->copies[i].second, 1) < 0) return -1;
    for (int i = 0; i < steps->moves_count; i++) {
        int take = steps->moves[i].first;
        if (take < 0 || take >= steps->takes_count) goto wrong;
        if (need(steps, steps->moves[i].second, steps->takes[take].nbytes) < 0) return -1;
    }
    if (steps->target < 0) return 0;
    /* Accept a reduction without contributions of peers: the first rank of a scan only posts its own array. */
    if ((!steps->takes_count && !steps->first_count) || (!steps->takes_count && !steps->own_count)) goto wrong;
    steps->nbytes_folded = steps->takes_count ? steps->takes[0].nbytes : steps->first[0].nbytes;
    if (steps->nbytes_folded % steps->itemsize) goto wrong;
    for (int i = 1; i < steps->takes_count; i++)
        if (steps->takes[i].nbytes != steps->nbytes_folded) goto wrong;
    for (int i = 0; i < steps->own_count; i++) {
        if (steps->own[i].first < 0 || steps->own[i].first > steps->takes_count + i) goto wrong;
        if (need(steps, steps->own[i].second, steps->nbytes_folded) < 0) return -1;
    }
    return need(steps, steps->target, steps->nbytes_folded);
wrong:
    PyErr_SetString(PyExc_ValueError, "the parts of the round are inconsistent");
    return -1;
}

static void find_loop(Steps *steps, PyObject *ufunc) {
    PyUFuncObject *found = (PyUFuncObject *)ufunc;
    int type = steps->storage->type_num;
    /* The NumPy loop requires native byte order. */
    if (PyDataType_REFCHK(steps->storage) || !PyArray_ISNBO(steps->storage->byteorder)) return;
    if (found->nin != 2 || found->nout != 1 || !found->functions) return;
    for (int i = 0; i < found->ntypes; i++) {
        const char *types = found->types + 3 * i;
        if (types[0] == type && types[1] == type && types[2] == type) {
            steps->loop = found->functions[i];
            steps->loop_data = found->data ? ((void **)found->data)[i] : NULL;
            return;
        }
    }
}

/* Copy the regions of one direction of a relay from Python tuples (buffer, start, stop). */
static int way_from(Steps *steps, PyObject *regions, Way *way) {
    if (!(way->regions = rows(regions, &way->steps, sizeof(Region)))) return -1;
    npy_intp longest = 0;
    for (int i = 0; i < way->steps; i++) {
        int buffer;
        Py_ssize_t start, stop;
        if (!PyArg_ParseTuple(ITEM(regions, i), "inn", &buffer, &start, &stop)) return -1;
        if (start < 0 || stop < start || stop > PY_SSIZE_T_MAX / steps->itemsize || buffer < 0 ||
            buffer >= steps->buffers_count)
            return PyErr_SetString(PyExc_ValueError, "a region is out of range"), -1;
        if (need(steps, buffer, stop * steps->itemsize) < 0) return -1;
        way->regions[i] = (Region){buffer, start, stop - start};
        if (stop - start > longest) longest = stop - start;
    }
    way->chunks = (longest + steps->chunk - 1) / steps->chunk;
    return 0;
}

/* Copy a relay from a Python tuple: the elements per chunk; the number of steps by which sends follow receives; the
   regions to send, to receive, and to reduce received data with; the target and source of a local copy. */
static int relay_from(Steps *self, PyObject *relay) {
    PyObject *puts, *takes, *sources, *copy;
    Py_ssize_t chunk;
    const Way *outward = &self->outward, *inward = &self->inward, *operands = &self->operands, *local = &self->local;
    if (!PyArg_ParseTuple(relay, "niO!O!O!O!", &chunk, &self->behind, &PyTuple_Type, &puts, &PyTuple_Type, &takes,
                          &PyTuple_Type, &sources, &PyTuple_Type, &copy))
        return -1;
    if (chunk < 1 || self->size < 2 || self->behind < 0 || self->behind > 1) goto wrong;
    self->chunk = chunk;
    if (way_from(self, puts, &self->outward) < 0 || way_from(self, takes, &self->inward) < 0) return -1;
    if (way_from(self, sources, &self->operands) < 0 || way_from(self, copy, &self->local) < 0) return -1;
    int passes_on = outward->steps > self->behind;
    if (passes_on && (inward->steps != outward->steps || inward->chunks != outward->chunks)) goto wrong;
    if (operands->steps > inward->steps) goto wrong;
    for (int i = 0; i < operands->steps; i++)
        if (operands->regions[i].count != inward->regions[i].count) goto wrong;
    if (!local->steps) return 0;
    if (local->steps == 2 && local->regions[0].count == local->regions[1].count) return 0;
wrong:
    PyErr_SetString(PyExc_ValueError, "the parts of the relay are inconsistent");
    return -1;
}

/* The argument `round` is a Python `Round`, or the tuple that `relay_from` copies. */
static int Steps_init(Steps *self, PyObject *args, PyObject *kwargs) {
    PyObject *plan, *kind, *op, *signature, *storage, *round, *ufunc, *fold_function, *copies, *first, *takes, *target,
        *own, *moves, *last;
    unsigned long long fingerprint;
    int size;
    if (self->plan) return PyErr_SetString(PyExc_TypeError, "the object is already initialized"), -1;
    if (!PyArg_ParseTuple(args, "OOOOKO!iiO!OO", &plan, &kind, &op, &signature, &fingerprint, &PyArrayDescr_Type,
                          &storage, &self->buffers_count, &size, &PyTuple_Type, &round, &ufunc, &fold_function))
        return -1;
    enum { OF_RELAY = 6 };
    if (PyTuple_Size(round) != OF_RELAY &&
        !PyArg_ParseTuple(round, "O!O!O!OO!O!O!p", &PyTuple_Type, &copies, &PyTuple_Type, &first, &PyTuple_Type, &takes,
                          &target, &PyTuple_Type, &own, &PyTuple_Type, &moves, &PyTuple_Type, &last, &self->is_private))
        return -1;
    KEEP(plan), self->plan = plan;
    KEEP(kind), self->kind = kind;
    KEEP(op), self->op = op;
    KEEP(signature), self->signature = signature;
    KEEP(storage), self->storage = (PyArray_Descr *)storage;
    self->fingerprint = fingerprint;
    self->itemsize = PyDataType_ELSIZE(self->storage);
    self->size = size;
    if (self->itemsize <= 0 || self->buffers_count < 0)
        return PyErr_SetString(PyExc_ValueError, "the item size or the number of buffers is invalid"), -1;
    if (!(self->needed = PyMem_Calloc(self->buffers_count ? self->buffers_count : 1, sizeof(npy_intp))))
        return PyErr_NoMemory(), -1;
    self->target = -1;
    if (PyTuple_Size(round) == OF_RELAY) {
        if (PyObject_TypeCheck(ufunc, &PyUFunc_Type)) find_loop(self, ufunc);
        return relay_from(self, round);
    }
    long number = target == Py_None ? -1 : PyLong_AsLong(target);
    if (PyErr_Occurred()) return -1;
    if (number < -1 || number >= self->buffers_count)
        return PyErr_SetString(PyExc_ValueError, "the target buffer of the reduction does not exist"), -1;
    self->target = (int)number;
    if (contributions_from(first, self, size, &self->first, &self->first_count) < 0) return -1;
    if (contributions_from(last, self, size, &self->last, &self->last_count) < 0) return -1;
    if (takes_from(takes, self, size) < 0 || pairs_from(copies, &self->copies, &self->copies_count) < 0) return -1;
    if (pairs_from(own, &self->own, &self->own_count) < 0 || pairs_from(moves, &self->moves, &self->moves_count) < 0)
        return -1;
    if (check(self) < 0) return -1;
    self->is_small = 1;
    for (int i = 0; i < self->first_count; i++) self->is_small &= self->first[i].first_slot < LAYOUT_SMALL_SLOTS;
    for (int i = 0; i < self->last_count; i++) self->is_small &= self->last[i].first_slot < LAYOUT_SMALL_SLOTS;
    for (int i = 0; i < self->takes_count; i++) self->is_small &= self->takes[i].first_slot < LAYOUT_SMALL_SLOTS;
    if (self->target >= 0) {
        if (ufunc != Py_None && PyObject_TypeCheck(ufunc, &PyUFunc_Type)) find_loop(self, ufunc);
        KEEP(fold_function), self->fold = fold_function;
    }
    return 0;
}

static int Steps_traverse(Steps *self, visitproc visit, void *arg) {
    Py_VISIT(TYPE_OF(self));
    Py_VISIT(self->plan);
    Py_VISIT(self->kind);
    Py_VISIT(self->op);
    Py_VISIT(self->signature);
    Py_VISIT(self->fold);
    for (int i = 0; i < self->first_count && self->first; i++) Py_VISIT(self->first[i].lanes);
    for (int i = 0; i < self->last_count && self->last; i++) Py_VISIT(self->last[i].lanes);
    return 0;
}

static void clear_contributions(Contribution *contributions, int count) {
    for (int i = 0; i < count && contributions; i++) Py_CLEAR(contributions[i].lanes);
}

static int Steps_clear(Steps *self) {
    Py_CLEAR(self->plan);
    Py_CLEAR(self->kind);
    Py_CLEAR(self->op);
    Py_CLEAR(self->signature);
    Py_CLEAR(self->fold);
    clear_contributions(self->first, self->first_count);
    clear_contributions(self->last, self->last_count);
    return 0;
}

static void Steps_dealloc(Steps *self) {
    PyObject_GC_UnTrack(self);
    Steps_clear(self);
    DROP(self->storage);
    for (int i = 0; i < self->first_count && self->first; i++) PyMem_Free(self->first[i].readers);
    for (int i = 0; i < self->last_count && self->last; i++) PyMem_Free(self->last[i].readers);
    PyMem_Free(self->first), PyMem_Free(self->last), PyMem_Free(self->copies);
    PyMem_Free(self->outward.regions), PyMem_Free(self->inward.regions);
    PyMem_Free(self->operands.regions), PyMem_Free(self->local.regions);
    PyMem_Free(self->takes), PyMem_Free(self->own), PyMem_Free(self->moves), PyMem_Free(self->needed);
    free_object(self);
}

static PyMemberDef Steps_members[] = {
    {"plan", T_OBJECT, offsetof(Steps, plan), READONLY, "The plan of the collective."}, {0}};
static PyType_Slot Steps_slots[] = {
    {Py_tp_doc, "Steps(plan, kind, op, signature, fingerprint, storage, buffers, size, round, ufunc, fold, /)\n--\n\n"
                "A collective of one round, prepared for one rank."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, Steps_init},
    {Py_tp_traverse, Steps_traverse},
    {Py_tp_clear, Steps_clear},
    {Py_tp_dealloc, Steps_dealloc},
    {Py_tp_members, Steps_members},
    {0}};
PyType_Spec Steps_spec = {"aiocoll.native._core.Steps", sizeof(Steps), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                          Steps_slots};

/* ---- reductions */

static char *bytes_of(PyObject *array) { return PyArray_BYTES((PyArrayObject *)array); }

/* Return the address of the memory of buffer number `buffer`.

   The call's `arrays` are a list of the buffers, one array that is the only buffer, or a pair. The first array of a
   pair has one part per rank, the second array has one part or as many. Each part is a buffer. */
char *buffer_bytes(Handle *call, int buffer) {
    PyObject *arrays = call->arrays;
    if (PyList_Check(arrays)) return bytes_of(PyList_GetItem(arrays, buffer));
    if (!PyTuple_Check(arrays)) return bytes_of(arrays);
    int size = call->calls->size, is_other = buffer >= size;
    npy_intp part = PyArray_NBYTES((PyArrayObject *)PyTuple_GetItem(arrays, 0)) / size;
    return bytes_of(PyTuple_GetItem(arrays, is_other)) + (buffer - (is_other ? size : 0)) * part;
}

static void combine(const Steps *steps, char *a, char *b, char *out) {
    char *arguments[3] = {a, b, out};
    npy_intp count = steps->nbytes_folded / steps->itemsize,
             strides[3] = {steps->itemsize, steps->itemsize, steps->itemsize};
    steps->loop(arguments, &count, strides, steps->loop_data);
}

static PyObject *array_over(const Steps *steps, char *bytes, int flags) {
    npy_intp count = steps->nbytes_folded / steps->itemsize;
    KEEP(steps->storage);
    return PyArray_NewFromDescr(&PyArray_Type, steps->storage, 1, &count, NULL, bytes, flags, NULL);
}

static int fold_in_python(Handle *call, char **inputs, int count, char *out) {
    const Steps *steps = call->steps;
    PyObject *list = PyList_New(0), *target = array_over(steps, out, NPY_ARRAY_CARRAY), *done = NULL;
    if (!list || !target) goto end;
    for (int i = 0; i < count; i++) {
        PyObject *input = array_over(steps, inputs[i], NPY_ARRAY_CARRAY_RO);
        if (!input || PyList_Append(list, input) < 0) {
            DROP(input);
            goto end;
        }
        DROP(input);
    }
    done = PyObject_CallFunctionObjArgs(call->calls->quiet, steps->fold, list, target, NULL);
end:
    DROP(list);
    DROP(target);
    if (!done) return -1;
    DROP(done);
    return 0;
}

/* Return whether a result is a NaN, or a complex number that contains one. */
static int is_nan(const Steps *steps, const char *bytes) {
    int is_single = steps->storage->type_num == NPY_FLOAT || steps->storage->type_num == NPY_CFLOAT;
    for (npy_intp at = 0; at < steps->itemsize; at += is_single ? sizeof(float) : sizeof(double)) {
        float single;
        double number;
        if (is_single) memcpy(&single, bytes + at, sizeof single), number = single;
        else memcpy(&number, bytes + at, sizeof number);
        if (isnan(number)) return 1;
    }
    return 0;
}

static int is_one_number(const Steps *steps) {
    int type = steps->storage->type_num;
    return steps->nbytes_folded == steps->itemsize &&
           (type == NPY_FLOAT || type == NPY_DOUBLE || type == NPY_CFLOAT || type == NPY_CDOUBLE);
}

/* Reduce arrays of one element. If the result is a NaN, let Python reduce: it uses scalars, which produce other NaNs
   than a loop over arrays. */
static int fold_numbers(Handle *call, char **inputs, int count, char *out) {
    const Steps *steps = call->steps;
    char result[2 * sizeof(double)];
    memcpy(result, inputs[0], steps->itemsize);
    for (int i = 1; i < count; i++) combine(steps, result, inputs[i], result);
    if (is_nan(steps, result)) return fold_in_python(call, inputs, count, out);
    memcpy(out, result, steps->itemsize);
    return 0;
}

static char *scratch_of(Calls *calls, npy_intp nbytes) {
    if (calls->scratch_nbytes < nbytes) {
        PyMem_Free(calls->scratch);
        calls->scratch = PyMem_Malloc(nbytes);
        calls->scratch_nbytes = calls->scratch ? nbytes : 0;
    }
    return calls->scratch;
}

/* Reduce contributions into the target buffer, in rank order. `found` contains the addresses of the peers'
   contributions. */
int fold(Handle *call, char **found) {
    const Steps *steps = call->steps;
    npy_intp nbytes = steps->nbytes_folded;
    int count = steps->takes_count;
    char *inputs[count + steps->own_count], *out = buffer_bytes(call, steps->target);
    memcpy(inputs, found, count * sizeof *inputs);
    for (int i = 0; i < steps->own_count; i++, count++) {
        char **place = inputs + steps->own[i].first;
        memmove(place + 1, place, (count - steps->own[i].first) * sizeof *inputs);
        *place = buffer_bytes(call, steps->own[i].second);
    }
    if (!steps->loop) return fold_in_python(call, inputs, count, out);
    if (is_one_number(steps)) return fold_numbers(call, inputs, count, out);
    if (count == 1) {
        copy_bytes(out, inputs[0], nbytes);
    } else if (count == 2) {
        combine(steps, inputs[0], inputs[1], out);
    } else { /* write the target last, because it may be one of the inputs */
        char *scratch = scratch_of(call->calls, nbytes);
        if (!scratch) return PyErr_NoMemory(), -1;
        combine(steps, inputs[0], inputs[1], scratch);
        for (int i = 2; i < count - 1; i++) combine(steps, scratch, inputs[i], scratch);
        combine(steps, scratch, inputs[count - 1], out);
    }
    return 0;
}
