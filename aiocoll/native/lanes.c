/* Lanes of outboxes: post a contribution, look for one, free it; wake a peer that sleeps.

   The layout and the rules are those of aiocoll/transport/shm/slots.py, whose writers and readers work on the same
   memory. What a writer keeps to itself (numbers of posts, memory that is there, readers) is in arrays that both use. */
#include "accelerator.h"

#include <sched.h>
#include <unistd.h>

static int slots_from(Slots *slots, char *base, Py_ssize_t nbytes, PyObject *layout) {
    Py_ssize_t lines, small, small_nbytes, middle, middle_nbytes, end;
    if (!PyArg_ParseTuple(layout, "nnnnnn", &lines, &small, &small_nbytes, &middle, &middle_nbytes, &end)) return -1;
    if (end > nbytes || lines < 0 || lines % 8) {
        PyErr_SetString(PyExc_ValueError, "the lane is longer than its memory");
        return -1;
    }
    *slots = (Slots){base, (Word *)(base + lines), small, small_nbytes, middle, middle_nbytes};
    return 0;
}

static int numbers_from(PyObject *posted, PyObject *ready, Py_buffer *posted_view, Py_buffer *ready_view) {
    if (PyObject_GetBuffer(posted, posted_view, PyBUF_WRITABLE) < 0) return -1;
    if (PyObject_GetBuffer(ready, ready_view, PyBUF_WRITABLE) < 0) return -1;
    if (posted_view->len != 8 * LAYOUT_SLOTS || ready_view->len != LAYOUT_SLOTS) {
        PyErr_SetString(PyExc_ValueError, "a lane has one number, and one flag, per slot");
        return -1;
    }
    return 0;
}

/* ---- the common lane */

static int CommonLane_init(CommonLane *self, PyObject *args, PyObject *kwargs) {
    PyObject *memory, *layout, *posted, *ready, *readers, *reserve;
    if (!PyArg_ParseTuple(args, "OO!OOO!O", &memory, &PyTuple_Type, &layout, &posted, &ready, &PyList_Type, &readers, &reserve)) return -1;
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE) < 0) return -1;
    if (slots_from(&self->slots, self->memory.buf, self->memory.len, layout) < 0) return -1;
    if (numbers_from(posted, ready, &self->posted, &self->ready) < 0) return -1;
    if (PyList_Size(readers) != LAYOUT_SLOTS) {
        PyErr_SetString(PyExc_ValueError, "a lane has one list of readers per slot");
        return -1;
    }
    self->numbers = self->posted.buf;
    self->is_reserved = self->ready.buf;
    KEEP(readers);
    self->readers = readers;
    KEEP(reserve);
    self->reserve = reserve;
    return 0;
}

static int CommonLane_traverse(CommonLane *self, visitproc visit, void *arg) {
    Py_VISIT(TYPE_OF(self));
    Py_VISIT(self->readers);
    Py_VISIT(self->reserve);
    return 0;
}

static int CommonLane_clear(CommonLane *self) {
    Py_CLEAR(self->readers);
    Py_CLEAR(self->reserve);
    return 0;
}

static void free_object(PyObject *self) {
    PyTypeObject *type = TYPE_OF(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    DROP(type);
}

static void CommonLane_dealloc(CommonLane *self) {
    PyObject_GC_UnTrack(self);
    CommonLane_clear(self);
    PyBuffer_Release(&self->memory);
    PyBuffer_Release(&self->posted);
    PyBuffer_Release(&self->ready);
    free_object((PyObject *)self);
}

static PyObject *CommonLane_close(CommonLane *self, PyObject *Py_UNUSED(unused)) {
    CommonLane_clear(self);
    PyBuffer_Release(&self->memory);
    Py_RETURN_NONE;
}

static PyMethodDef CommonLane_methods[] = {
    {"close", (PyCFunction)CommonLane_close, METH_NOARGS, "Let go of the memory: no link is open any more."}, {0}};
static PyType_Slot CommonLane_slots[] = {
    {Py_tp_doc, "The common lane of this rank's outbox."}, {Py_tp_new, PyType_GenericNew}, {Py_tp_init, CommonLane_init},
    {Py_tp_traverse, CommonLane_traverse}, {Py_tp_clear, CommonLane_clear}, {Py_tp_dealloc, CommonLane_dealloc}, {Py_tp_methods, CommonLane_methods}, {0}};
PyType_Spec CommonLane_spec = {"aiocoll.native._core.CommonLane", sizeof(CommonLane), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, CommonLane_slots};

/* ---- the lanes of a peer */

static int PeerLanes_init(PeerLanes *self, PyObject *args, PyObject *kwargs) {
    PyObject *memory, *layout, *posted, *ready, *theirs, *common_layout, *lane_layout, *status, *reserve, *attend, *writer, *common;
    Py_ssize_t lane_start;
    if (!PyArg_ParseTuple(args, "OO!OOOnO!O!OOOOO!i", &memory, &PyTuple_Type, &layout, &posted, &ready, &theirs, &lane_start,
                          &PyTuple_Type, &common_layout, &PyTuple_Type, &lane_layout, &status, &reserve, &attend, &writer,
                          CommonLane_type, &common, &self->eventfd)) return -1;
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE) < 0) return -1;
    if (slots_from(&self->slots, self->memory.buf, self->memory.len, layout) < 0) return -1;
    if (numbers_from(posted, ready, &self->posted, &self->ready) < 0) return -1;
    if (PyObject_GetBuffer(theirs, &self->theirs, PyBUF_SIMPLE) < 0) return -1;
    char *base = self->theirs.buf;
    if (lane_start < 0 || lane_start % LAYOUT_LINE || lane_start > self->theirs.len) {
        PyErr_SetString(PyExc_ValueError, "the peer's lane is outside of its outbox");
        return -1;
    }
    if (slots_from(&self->common_slots, base, self->theirs.len, common_layout) < 0) return -1;
    if (slots_from(&self->lane_slots, base + lane_start, self->theirs.len - lane_start, lane_layout) < 0) return -1;
    if (PyObject_GetBuffer(status, &self->status, PyBUF_SIMPLE) < 0) return -1;
    if (self->status.len < 8 * (LAYOUT_CORE + 1)) {
        PyErr_SetString(PyExc_ValueError, "the doorbell has too few words");
        return -1;
    }
    self->numbers = self->posted.buf;
    self->is_reserved = self->ready.buf;
    self->words = self->memory.buf;
    self->peer_words = (Word *)(base + lane_start);
    self->own_status = self->status.buf;
    self->peer_status = (Word *)base;
    KEEP(reserve);
    self->reserve = reserve;
    KEEP(attend);
    self->attend = attend;
    KEEP(writer);
    self->writer = writer;
    KEEP(common);
    self->common = (CommonLane *)common;
    self->can_post = self->can_look = 1;
    return 0;
}

static int PeerLanes_traverse(PeerLanes *self, visitproc visit, void *arg) {
    Py_VISIT(TYPE_OF(self));
    Py_VISIT(self->reserve);
    Py_VISIT(self->attend);
    Py_VISIT(self->writer);
    Py_VISIT(self->common);
    return 0;
}

static int PeerLanes_clear(PeerLanes *self) {
    Py_CLEAR(self->reserve);
    Py_CLEAR(self->attend);
    Py_CLEAR(self->writer);
    Py_CLEAR(self->common);
    return 0;
}

static void release_memory(PeerLanes *self) {
    self->can_post = self->can_look = 0;
    PyBuffer_Release(&self->memory);
    PyBuffer_Release(&self->posted);
    PyBuffer_Release(&self->ready);
    PyBuffer_Release(&self->theirs);
    PyBuffer_Release(&self->status);
}

static void PeerLanes_dealloc(PeerLanes *self) {
    PyObject_GC_UnTrack(self);
    PeerLanes_clear(self);
    release_memory(self);
    free_object((PyObject *)self);
}

static PyObject *PeerLanes_retire(PeerLanes *self, PyObject *Py_UNUSED(unused)) {
    self->can_post = 0;
    Py_RETURN_NONE;
}

static PyObject *PeerLanes_close(PeerLanes *self, PyObject *Py_UNUSED(unused)) {
    PeerLanes_clear(self);
    release_memory(self);
    Py_RETURN_NONE;
}

static PyMethodDef PeerLanes_methods[] = {
    {"retire", (PyCFunction)PeerLanes_retire, METH_NOARGS, "Post nothing more: the link is not used any more."},
    {"close", (PyCFunction)PeerLanes_close, METH_NOARGS, "Let go of the memory: the link has ended."},
    {0}};
static PyType_Slot PeerLanes_slots[] = {
    {Py_tp_doc, "The lane of this rank for a peer, and the lanes of the peer."}, {Py_tp_new, PyType_GenericNew}, {Py_tp_init, PeerLanes_init},
    {Py_tp_traverse, PeerLanes_traverse}, {Py_tp_clear, PeerLanes_clear}, {Py_tp_dealloc, PeerLanes_dealloc}, {Py_tp_methods, PeerLanes_methods}, {0}};
PyType_Spec PeerLanes_spec = {"aiocoll.native._core.PeerLanes", sizeof(PeerLanes), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, PeerLanes_slots};

/* ---- posts */

static int reserve_slot(PyObject *function, char *is_reserved, uint32_t slot, npy_intp nbytes) {
    if (is_reserved[slot] || !function) return function != NULL;
    PyObject *done = PyObject_CallFunction(function, "In", (unsigned int)slot, (Py_ssize_t)nbytes);
    if (!done) return -1;
    int is_there = PyObject_IsTrue(done);
    DROP(done);
    return is_there;
}

/* Make the memory of a slot, if it is not there: 0 if the host has none, -1 for an exception. A lane's lines are made
   with its first slot, those of the common lane with the outbox. */
int lane_reserve(PeerLanes *peer, uint32_t slot, npy_intp nbytes) {
    if (nbytes <= INLINE_NBYTES && peer->has_lines) return 1;
    int is_there = reserve_slot(peer->reserve, peer->is_reserved, slot, nbytes);
    if (is_there > 0) peer->has_lines = 1;
    return is_there;
}
int common_reserve(CommonLane *common, uint32_t slot, npy_intp nbytes) {
    return nbytes <= INLINE_NBYTES ? 1 : reserve_slot(common->reserve, common->is_reserved, slot, nbytes);
}

static void fill(const Slots *slots, const Post *post) {
    Word *line = slots->lines + post->slot * 8;
    /* The group comes first: a reader that was given up, and goes on, finds that this is not what it was reading. */
    store(line + 1, post->group);
    fence_release();
    store(line, post->identity);
    store(line + 2, (uint64_t)post->nbytes);
    store(line + 3, post->fingerprint);
    if (post->nbytes) memcpy(slot_bytes(slots, post->slot, post->nbytes), post->bytes, post->nbytes);
}

static void name(PeerLanes *peer, int named, uint32_t slot, uint64_t number) {
    store_release(peer->words + named + slot, number);
    store_release(peer->words + LAYOUT_POSTS, load(peer->words + LAYOUT_POSTS) + 1);
}

int lane_is_free(PeerLanes *peer, uint32_t slot) {
    return load_acquire(peer->peer_words + LAYOUT_LANE_CONSUMED + slot) == peer->numbers[slot];
}

int lane_post(PeerLanes *peer, const Post *post) {
    fill(&peer->slots, post);
    name(peer, LAYOUT_LANE_NAMED, post->slot, ++peer->numbers[post->slot]);
    return ring(peer);
}

/* Return whether all readers of the last post have consumed it: 0 also where Python has to find that out. */
int common_is_free(CommonLane *common, uint32_t slot) {
    PyObject *readers = PyList_GetItem(common->readers, slot);
    Py_ssize_t count = readers ? PySequence_Size(readers) : -1;
    if (count < 0) return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *writer = PySequence_GetItem(readers, i);
        PyObject *lanes = writer ? PyObject_GetAttr(writer, name_native) : NULL;
        DROP(writer);
        if (!lanes) return -1;
        int is_free = TYPE_OF(lanes) == PeerLanes_type && ((PeerLanes *)lanes)->can_look &&
                      load_acquire(((PeerLanes *)lanes)->peer_words + LAYOUT_COMMON_CONSUMED + slot) == common->numbers[slot];
        DROP(lanes);
        if (!is_free) return 0;
    }
    return 1;
}

int common_post(const Post *post, PeerLanes **peers, int count, PyObject *lanes) {
    CommonLane *common = peers[0]->common;
    uint32_t slot = post->slot;
    fill(&common->slots, post);
    uint64_t number = ++common->numbers[slot];
    KEEP(lanes);
    if (PyList_SetItem(common->readers, slot, lanes) < 0) return -1;
    for (int i = 0; i < count; i++) name(peers[i], LAYOUT_COMMON_NAMED, slot, number);
    for (int i = 0; i < count; i++)
        if (ring(peers[i]) < 0) return -1;
    return 0;
}

/* ---- readers */

int lane_look(PeerLanes *peer, int is_common, uint32_t slot, const Post *expected, int compares_length) {
    const Word *named = peer->peer_words + (is_common ? LAYOUT_COMMON_NAMED : LAYOUT_LANE_NAMED) + slot;
    const Word *consumed = peer->words + (is_common ? LAYOUT_COMMON_CONSUMED : LAYOUT_LANE_CONSUMED) + slot;
    if (load_acquire(named) <= load(consumed)) return MISSING;
    const Word *line = (is_common ? peer->common_slots : peer->lane_slots).lines + slot * 8;
    if (load(line) != expected->identity || load(line + 1) != expected->group) return MISSING;
    if (load(line + 3) != expected->fingerprint) return DIFFERENT;
    return compares_length && load(line + 2) != (uint64_t)expected->nbytes ? DIFFERENT : PRESENT;
}

/* Be done with a post: 0 if it was overwritten while it was read, since the peer has given this rank up. */
int lane_free(PeerLanes *peer, int is_common, uint32_t slot, uint64_t group) {
    const Word *line = (is_common ? peer->common_slots : peer->lane_slots).lines + slot * 8;
    fence_acquire();
    if (load(line + 1) != group) return 0;
    uint64_t number = load(peer->peer_words + (is_common ? LAYOUT_COMMON_NAMED : LAYOUT_LANE_NAMED) + slot);
    store_release(peer->words + (is_common ? LAYOUT_COMMON_CONSUMED : LAYOUT_LANE_CONSUMED) + slot, number);
    return 1;
}

/* ---- the doorbell */

/* Wake the peer if it sleeps: it then sees what was stored before. This rank looks at its links in the next turn, too. */
int ring(PeerLanes *peer) {
    if (load(peer->own_status + LAYOUT_STATUS) & 1) {
        PyObject *done = PyObject_CallNoArgs(peer->attend);
        if (!done) return -1;
        DROP(done);
    }
    fence_full();
    uint64_t status = load(peer->peer_status + LAYOUT_STATUS);
    if (status & 1 && status != peer->rung) {
        uint64_t one = 1;
        peer->rung = status;
        if (write(peer->eventfd, &one, sizeof one) < 0) return 0; /* it is full: the peer will be woken by that */
    }
    return 0;
}

/* Return whether the peer was on the core of this rank when it last waited for long. */
int is_beside(PeerLanes *peer) {
    uint64_t core = (uint64_t)(sched_getcpu() + 1);
    if (load(peer->own_status + LAYOUT_CORE) != core) store(peer->own_status + LAYOUT_CORE, core);
    return core && load(peer->peer_status + LAYOUT_CORE) == core;
}
