/* Lanes of outboxes: posting, finding and freeing contributions, and waking a sleeping peer.

   The memory layout and the protocol are those of aiocoll/transport/shm/slots.py, whose writers and readers use the
   same memory. The private state of a writer (numbers of posts, allocated slots, readers) is in arrays that both
   implementations use. */
#include "accelerator.h"

#include <sched.h>
#include <unistd.h>

/* Return whether `count` items of `size` bytes, from offset `start` on, fit into memory of `nbytes` bytes. */
static int is_inside(Py_ssize_t start, Py_ssize_t count, Py_ssize_t size, Py_ssize_t nbytes) {
    return start >= 0 && size >= 0 && start <= nbytes && size <= (nbytes - start) / count;
}

/* Copy and check the layout of a lane's slots. `words` control words precede the lines of the slots. */
static int slots_from(Slots *slots, char *base, Py_ssize_t nbytes, Py_ssize_t words, PyObject *layout) {
    Py_ssize_t lines, small, small_nbytes, middle, middle_nbytes, end;
    if (!PyArg_ParseTuple(layout, "nnnnnn", &lines, &small, &small_nbytes, &middle, &middle_nbytes, &end)) return -1;
    int fits = (uintptr_t)base % LAYOUT_LINE == 0 && lines >= words * 8 && lines % LAYOUT_LINE == 0 &&
               is_inside(lines, LAYOUT_SLOTS, LAYOUT_LINE, nbytes) &&
               is_inside(small, LAYOUT_SMALL_SLOTS, small_nbytes, nbytes) &&
               is_inside(middle, LAYOUT_MIDDLE_SLOTS, middle_nbytes, nbytes);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "the lane does not fit into its memory");
        return -1;
    }
    *slots = (Slots){base, (Word *)(base + lines), small, small_nbytes, middle, middle_nbytes, 0};
    return 0;
}

static int raise_initialized(void) {
    PyErr_SetString(PyExc_TypeError, "the object is already initialized");
    return -1;
}

static int numbers_from(PyObject *posted, PyObject *ready, Py_buffer *posted_view, Py_buffer *ready_view) {
    if (PyObject_GetBuffer(posted, posted_view, PyBUF_WRITABLE) < 0) return -1;
    if (PyObject_GetBuffer(ready, ready_view, PyBUF_WRITABLE) < 0) return -1;
    if (posted_view->len != 8 * LAYOUT_SLOTS || ready_view->len != LAYOUT_SLOTS) {
        PyErr_SetString(PyExc_ValueError, "a lane must have one number and one flag per slot");
        return -1;
    }
    return 0;
}

/* ---- the common lane */

static int CommonLane_init(CommonLane *self, PyObject *args, PyObject *kwargs) {
    PyObject *memory, *layout, *posted, *ready, *readers, *reserve;
    if (self->memory.obj || self->posted.obj) return raise_initialized();
    if (!PyArg_ParseTuple(args, "OO!OOO!O", &memory, &PyTuple_Type, &layout, &posted, &ready, &PyList_Type, &readers,
                          &reserve))
        return -1;
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE) < 0) return -1;
    if (slots_from(&self->slots, self->memory.buf, self->memory.len, 0, layout) < 0) return -1;
    if (numbers_from(posted, ready, &self->posted, &self->ready) < 0) return -1;
    if (PyList_Size(readers) != LAYOUT_SLOTS) {
        PyErr_SetString(PyExc_ValueError, "a lane must have one list of readers per slot");
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

static void CommonLane_dealloc(CommonLane *self) {
    PyObject_GC_UnTrack(self);
    CommonLane_clear(self);
    PyBuffer_Release(&self->memory);
    PyBuffer_Release(&self->posted);
    PyBuffer_Release(&self->ready);
    free_object(self);
}

static PyObject *CommonLane_close(CommonLane *self, PyObject *Py_UNUSED(unused)) {
    CommonLane_clear(self);
    PyBuffer_Release(&self->memory);
    Py_RETURN_NONE;
}

static PyMethodDef CommonLane_methods[] = {
    {"close", (PyCFunction)CommonLane_close, METH_NOARGS,
     "close($self, /)\n--\n\nRelease the memory, since no link is open any more."},
    {0}};
static PyType_Slot CommonLane_slots[] = {
    {Py_tp_doc,
     "CommonLane(memory, layout, posted, ready, readers, reserve, /)\n--\n\nThe common lane of this rank's outbox."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, CommonLane_init},
    {Py_tp_traverse, CommonLane_traverse},
    {Py_tp_clear, CommonLane_clear},
    {Py_tp_dealloc, CommonLane_dealloc},
    {Py_tp_methods, CommonLane_methods},
    {0}};
PyType_Spec CommonLane_spec = {"aiocoll.native._core.CommonLane", sizeof(CommonLane), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, CommonLane_slots};

/* ---- the lanes of a peer */

static int PeerLanes_init(PeerLanes *self, PyObject *args, PyObject *kwargs) {
    PyObject *memory, *layout, *posted, *ready, *theirs, *common_layout, *lane_layout, *status, *reserve, *poll_soon,
        *writer, *common;
    Py_ssize_t lane_start;
    if (self->memory.obj || self->posted.obj) return raise_initialized();
    if (!PyArg_ParseTuple(args, "OO!OOOnO!O!OOOOO!i", &memory, &PyTuple_Type, &layout, &posted, &ready, &theirs,
                          &lane_start, &PyTuple_Type, &common_layout, &PyTuple_Type, &lane_layout, &status, &reserve,
                          &poll_soon, &writer, CommonLane_type, &common, &self->eventfd))
        return -1;
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE) < 0) return -1;
    if (slots_from(&self->slots, self->memory.buf, self->memory.len, LAYOUT_LANE_WORDS, layout) < 0) return -1;
    if (numbers_from(posted, ready, &self->posted, &self->ready) < 0) return -1;
    if (PyObject_GetBuffer(theirs, &self->theirs, PyBUF_SIMPLE) < 0) return -1;
    char *base = self->theirs.buf;
    if (lane_start < 0 || lane_start % LAYOUT_LINE || lane_start > self->theirs.len) {
        PyErr_SetString(PyExc_ValueError, "the peer's lane is outside of its outbox");
        return -1;
    }
    if (slots_from(&self->common_slots, base, self->theirs.len, LAYOUT_CORE + 1, common_layout) < 0) return -1;
    if (slots_from(&self->lane_slots, base + lane_start, self->theirs.len - lane_start, LAYOUT_LANE_WORDS,
                   lane_layout) < 0)
        return -1;
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
    KEEP(poll_soon);
    self->poll_soon = poll_soon;
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
    Py_VISIT(self->reserve_queue);
    Py_VISIT(self->poll_soon);
    Py_VISIT(self->writer);
    Py_VISIT(self->common);
    return 0;
}

static int PeerLanes_clear(PeerLanes *self) {
    Py_CLEAR(self->reserve);
    Py_CLEAR(self->reserve_queue);
    Py_CLEAR(self->poll_soon);
    Py_CLEAR(self->writer);
    Py_CLEAR(self->common);
    return 0;
}

static void release_memory(PeerLanes *self) {
    self->can_post = self->can_look = 0;
    self->chunk_nbytes = 0;
    PyBuffer_Release(&self->region);
    PyBuffer_Release(&self->out_state);
    PyBuffer_Release(&self->in_state);
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
    free_object(self);
}

static PyObject *PeerLanes_retire(PeerLanes *self, PyObject *Py_UNUSED(unused)) {
    self->can_post = 0;
    Py_RETURN_NONE;
}

static PyObject *PeerLanes_close(PeerLanes *self, PyObject *Py_UNUSED(unused)) {
    self->can_post = self->can_look = 0;
    self->eventfd = -1; /* forget the descriptor, whose number may be reused for another file */
    PeerLanes_clear(self);
    if (!self->pins) release_memory(self);
    Py_RETURN_NONE;
}

/* Keep the memory of the lanes mapped while Python code runs, because this code may close the link. */
void pin(PeerLanes *peer) {
    KEEP(peer);
    peer->pins++;
}
void unpin(PeerLanes *peer) {
    if (!--peer->pins && !peer->can_look) release_memory(peer);
    DROP(peer);
}

/* ---- chunk queues */

static int queue_from(Queue *queue, const Py_buffer *region, const Py_ssize_t *layout, Py_buffer *state,
                      PyObject *numbers) {
    Py_ssize_t lines = layout[0], chunks = layout[1], nbytes = layout[2], count = layout[3], taken = layout[4],
               waiting = layout[5];
    if (PyObject_GetBuffer(numbers, state, PyBUF_WRITABLE) < 0) return -1;
    int fits = (uintptr_t)region->buf % LAYOUT_LINE == 0 && lines % LAYOUT_LINE == 0 && nbytes > 0 && count > 0 &&
               is_inside(lines, count, LAYOUT_LINE, region->len) && is_inside(chunks, count, nbytes, region->len) &&
               is_inside(taken, 1, 1, region->len / 8 - 1) && is_inside(waiting, 1, 1, region->len / 8 - 1) &&
               state->len >= 8 * LAYOUT_CHUNK_STATE;
    if (!fits) return PyErr_SetString(PyExc_ValueError, "the queue does not fit into its memory"), -1;
    char *base = region->buf;
    Word *words = region->buf;
    *queue = (Queue){base + chunks, (Word *)(base + lines), words + taken, words + waiting, state->buf, count, 0};
    return 0;
}

/* connect_queues(memory, outward, state, inward, peer_state, reserve): set the memory, layout and state of both
   chunk queues of the link. `reserve` allocates the memory of this rank's queue. */
static PyObject *PeerLanes_connect_queues(PeerLanes *self, PyObject *args) {
    PyObject *memory, *out_state, *in_state, *reserve;
    Py_ssize_t out[6], in[6];
    if (self->region.obj) return raise_initialized(), NULL;
    if (!PyArg_ParseTuple(args, "O(nnnnnn)O(nnnnnn)OO", &memory, out, out + 1, out + 2, out + 3, out + 4, out + 5,
                          &out_state, in, in + 1, in + 2, in + 3, in + 4, in + 5, &in_state, &reserve))
        return NULL;
    if (PyObject_GetBuffer(memory, &self->region, PyBUF_WRITABLE) < 0) return NULL;
    if (queue_from(&self->out, &self->region, out, &self->out_state, out_state) < 0 ||
        queue_from(&self->in, &self->region, in, &self->in_state, in_state) < 0)
        return NULL;
    KEEP(reserve), self->reserve_queue = reserve;
    self->chunk_nbytes = out[2] < in[2] ? out[2] : in[2];
    Py_RETURN_NONE;
}

/* Allocate the memory of the chunk queue to the peer. Return 0 if the link has no queue or the host has no memory
   left, -1 with an exception. */
int queue_is_ready(PeerLanes *peer) {
    if (!peer->chunk_nbytes || !peer->reserve_queue) return 0;
    if (peer->out.state[LAYOUT_CHUNK_READY]) return 1;
    PyObject *function = peer->reserve_queue;
    KEEP(function);
    PyObject *done = PyObject_CallNoArgs(function);
    DROP(function);
    int is_there = done ? PyObject_IsTrue(done) : -1;
    DROP(done);
    return is_there;
}

static PyMethodDef PeerLanes_methods[] = {{"connect_queues", (PyCFunction)PeerLanes_connect_queues, METH_VARARGS,
                                           "connect_queues($self, memory, outward, state, inward, peer_state, reserve, "
                                           "/)\n--\n\nAlso use the chunk queues of the link."},
                                          {"retire", (PyCFunction)PeerLanes_retire, METH_NOARGS,
                                           "retire($self, /)\n--\n\nStop posting, since the link is no longer used."},
                                          {"close", (PyCFunction)PeerLanes_close, METH_NOARGS,
                                           "close($self, /)\n--\n\nRelease the memory, since the link has ended."},
                                          {0}};
static PyType_Slot PeerLanes_slots[] = {
    {Py_tp_doc, "PeerLanes(memory, layout, posted, ready, theirs, lane_start, common_layout, lane_layout, status, "
                "reserve, poll_soon, "
                "writer, common, eventfd, /)\n--\n\nThe lanes between this rank and one peer."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, PeerLanes_init},
    {Py_tp_traverse, PeerLanes_traverse},
    {Py_tp_clear, PeerLanes_clear},
    {Py_tp_dealloc, PeerLanes_dealloc},
    {Py_tp_methods, PeerLanes_methods},
    {0}};
PyType_Spec PeerLanes_spec = {"aiocoll.native._core.PeerLanes", sizeof(PeerLanes), 0,
                              Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, PeerLanes_slots};

/* ---- posts */

static int reserve_slot(PyObject *function, uint32_t slot, npy_intp nbytes) {
    if (!function) return 0;
    KEEP(function);
    PyObject *done = PyObject_CallFunction(function, "In", (unsigned int)slot, (Py_ssize_t)nbytes);
    DROP(function);
    if (!done) return -1;
    int is_there = PyObject_IsTrue(done);
    DROP(done);
    return is_there;
}

int lane_has(const PeerLanes *peer, uint32_t slot, npy_intp nbytes) {
    return nbytes <= INLINE_NBYTES ? peer->has_lines : peer->is_reserved[slot];
}
int common_has(const CommonLane *common, uint32_t slot, npy_intp nbytes) {
    return nbytes <= INLINE_NBYTES || common->is_reserved[slot];
}

/* Allocate the memory of a slot. Return 0 if the host has no memory left, -1 with an exception. The lines of a lane
   are allocated with its first slot; the lines of the common lane exist from the start. */
int lane_reserve(PeerLanes *peer, uint32_t slot, npy_intp nbytes) {
    KEEP(peer);
    int is_there = reserve_slot(peer->reserve, slot, nbytes);
    if (is_there > 0) peer->has_lines = 1;
    DROP(peer);
    return is_there;
}
int common_reserve(CommonLane *common, uint32_t slot, npy_intp nbytes) {
    return reserve_slot(common->reserve, slot, nbytes);
}

static Word *line_of(const Slots *slots, uint32_t slot) { return slots->lines + slot * LINE_WORDS; }

static void fill(Slots *slots, const Post *post) {
    fill_line(line_of(slots, post->slot), &post->head);
    npy_intp nbytes = (npy_intp)post->head.length;
    if (nbytes) copy_to_reader(&slots->far, slot_bytes(slots, post->slot, nbytes), post->bytes, nbytes);
}

/* Return the id of the group that made the last post in a slot. */
uint64_t group_of_slot(const Slots *slots, uint32_t slot) { return load(line_of(slots, slot) + LINE_GROUP); }

int lane_is_free(PeerLanes *peer, uint32_t slot) {
    return is_consumed(peer->peer_words + LAYOUT_LANE_CONSUMED + slot, peer->numbers[slot]);
}

void lane_post(PeerLanes *peer, const Post *post) {
    fill(&peer->slots, post);
    publish(peer->words + LAYOUT_LANE_NAMED + post->slot, ++peer->numbers[post->slot], peer->words + LAYOUT_POSTS);
}

/* Return whether all readers have consumed the last post in a slot of the common lane. Return 0 also if only Python
   can determine this. */
int common_is_free(CommonLane *common, uint32_t slot) {
    PyObject *readers = common->readers ? PyList_GetItem(common->readers, slot) : NULL;
    if (!common->readers) return 0; /* the lane has been closed */
    Py_ssize_t count = readers ? PySequence_Size(readers) : -1;
    if (count < 0) return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *writer = PySequence_GetItem(readers, i);
        PyObject *lanes = writer ? PyObject_GetAttr(writer, name_native) : NULL;
        DROP(writer);
        if (!lanes) return -1;
        int is_free =
            TYPE_OF(lanes) == PeerLanes_type && ((PeerLanes *)lanes)->can_look &&
            is_consumed(((PeerLanes *)lanes)->peer_words + LAYOUT_COMMON_CONSUMED + slot, common->numbers[slot]);
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
    for (int i = 0; i < count; i++)
        publish(peers[i]->words + LAYOUT_COMMON_NAMED + slot, number, peers[i]->words + LAYOUT_POSTS);
    return 0;
}

/* ---- readers */

int lane_look(PeerLanes *peer, int is_common, uint32_t slot, const Head *expected, int compares_length) {
    const Word *named = peer->peer_words + (is_common ? LAYOUT_COMMON_NAMED : LAYOUT_LANE_NAMED) + slot;
    const Word *consumed = peer->words + (is_common ? LAYOUT_COMMON_CONSUMED : LAYOUT_LANE_CONSUMED) + slot;
    return look_for(named, consumed, line_of(is_common ? &peer->common_slots : &peer->lane_slots, slot), expected,
                    compares_length);
}

/* Mark a post of a peer as consumed. Return 0 if the peer, which no longer waits for this rank, has overwritten the
   post while this rank was reading it. */
int lane_free(PeerLanes *peer, int is_common, uint32_t slot, uint64_t group) {
    const Word *named = peer->peer_words + (is_common ? LAYOUT_COMMON_NAMED : LAYOUT_LANE_NAMED) + slot;
    Word *consumed = peer->words + (is_common ? LAYOUT_COMMON_CONSUMED : LAYOUT_LANE_CONSUMED) + slot;
    return consume(named, consumed, line_of(is_common ? &peer->common_slots : &peer->lane_slots, slot), group);
}

/* ---- the doorbell */

/* Make this rank check its links in the next loop iteration, so that its peers need not wake it for their replies. */
int poll_soon(PeerLanes *peer) {
    if (!(load(peer->own_status + LAYOUT_STATUS) & 1)) return 0;
    PyObject *function = peer->poll_soon;
    KEEP(function);
    PyObject *done = PyObject_CallNoArgs(function);
    DROP(function);
    DROP(done);
    return done ? 0 : -1;
}

/* Wake the peer if it sleeps. The peer then sees all data that was stored before the preceding full fence. */
void wake(PeerLanes *peer) {
    uint64_t status = sleeping(peer->peer_status + LAYOUT_STATUS, peer->rung), one = 1;
    if (status) {
        peer->rung = status;
        if (write(peer->eventfd, &one, sizeof one) < 0)
            return; /* ignore the error: the counter of the eventfd is full, so the peer wakes up anyway */
    }
}

/* Publish to the peers the number of the CPU core on which this rank runs. */
void note_core(PeerLanes *peer) {
    uint64_t core = (uint64_t)(sched_getcpu() + 1);
    if (load(peer->own_status + LAYOUT_CORE) != core) store(peer->own_status + LAYOUT_CORE, core);
}

/* Return whether the peer was on this rank's core when it last posted data or waited for long. */
int shares_core(PeerLanes *peer) {
    note_core(peer);
    uint64_t core = load(peer->own_status + LAYOUT_CORE);
    return core && load(peer->peer_status + LAYOUT_CORE) == core;
}
