/* Types and functions that several C files of the accelerator use. */
#ifndef AIOCOLL_ACCELERATOR_H
#define AIOCOLL_ACCELERATOR_H

#if !defined(Py_LIMITED_API) || !defined(NPY_TARGET_VERSION)
#error "hatch_build.py sets the versions of both interfaces"
#endif

#define PY_SSIZE_T_CLEAN
#define PY_ARRAY_UNIQUE_SYMBOL aiocoll_array_api
#define PY_UFUNC_UNIQUE_SYMBOL aiocoll_ufunc_api
#ifndef IMPORTS_NUMPY /* module.c defines the NumPy API; the other files use it */
#define NO_IMPORT_ARRAY
#define NO_IMPORT_UFUNC
#endif
#include <Python.h>
#include <structmember.h>

#include <numpy/arrayobject.h>
#include <numpy/ufuncobject.h>
#include <stddef.h>
#include <string.h>

#include "protocol.h"

#define INLINE_NBYTES                                                                                                  \
    ((LINE_WORDS - LINE_BYTES) * 8) /* largest contribution in bytes that fits into the line of its slot */
#define NO_PEER (-1)

enum { TRIES = 3 }; /* attempts: repeat checks after a called Python function may have changed the state */

/* The slots of one lane: lines of eight words, and memory for contributions that do not fit into their lines. */
typedef struct {
    char *base;
    Word *lines;
    npy_intp small, small_nbytes, middle, middle_nbytes;
    int far; /* number of further posts that bypass the caches */
} Slots;

/* The common lane of this rank's outbox. */
typedef struct {
    PyObject_HEAD Py_buffer memory, posted, ready;
    Slots slots;
    uint64_t *numbers; /* for each slot, the number of the last post in it */
    char *is_reserved; /* for each slot, whether its memory is allocated */
    PyObject *readers; /* list: for each slot, the lanes of all ranks that read the last post in it */
    PyObject *reserve; /* the Python function that allocates the memory of a slot */
} CommonLane;

/* This rank's end of a chunk queue: the writing or the reading end. */
typedef struct {
    char *chunks;
    Word *lines, *taken, *waiting;
    uint64_t *state;
    npy_intp count; /* number of chunks in the queue */
    int far;        /* number of further chunks that bypass the caches */
} Queue;

/* The lanes between this rank and one peer: this rank's lane for the peer, the peer's common lane, and the peer's
   lane for this rank. */
typedef struct {
    PyObject_HEAD Py_buffer memory, posted, ready, theirs, status;
    Py_buffer region, out_state, in_state; /* Python buffers of the chunk queues */
    Queue out, in;
    npy_intp chunk_nbytes; /* bytes per chunk; 0 without queues */
    PyObject *reserve_queue;
    Slots slots, common_slots,
        lane_slots;           /* slots of this rank's lane; of the peer's common lane; of the peer's lane */
    Word *words, *peer_words; /* control words of this rank's lane, and of the peer's lane */
    Word *own_status, *peer_status;
    uint64_t *numbers, rung;
    char *is_reserved;
    PyObject *reserve, *poll_soon, *writer;
    CommonLane *common;
    int eventfd, has_lines;
    int can_post; /* true if the link is open and in use */
    int can_look; /* true if the link is open */
    /* Number of C functions that use the memory while Python code may run. After `close`, the last of these functions
       releases the memory. */
    int pins;
} PeerLanes;

typedef struct {
    int buffer, is_common, readers_count, *readers;
    npy_intp nbytes;
    uint32_t first_slot, slots;
    /* The lanes of the readers, as the tuple that the common lane stores. Valid until a link of the group changes. */
    PyObject *lanes;
    uint64_t epoch;
} Contribution;

typedef struct {
    int peer, is_common;
    npy_intp nbytes;
    uint32_t first_slot, slots;
} Take;

/* A pair of indices. For a copy: target and source buffer. For a move: contribution and target buffer. For an input
   of this rank: its position among the inputs of the reduction, and its buffer. */
typedef struct {
    int first, second;
} Pair;

/* Consecutive elements of a buffer: `count` elements from `start` on. */
typedef struct {
    int buffer;
    npy_intp start, count;
} Region;

/* One direction of a relay (sending or receiving): one region per step, and the number of chunks per step. */
typedef struct {
    Region *regions;
    int steps;
    npy_intp chunks;
} Way;

/* This rank's actions in a collective of one round, or in a relay. The Python classes are `Round` and `Relay`. */
typedef struct {
    PyObject_HEAD PyObject *plan, *kind, *op, *signature,
        *fold; /* fold: the Python function that reduces if NumPy has no `loop` */
    uint64_t fingerprint;
    int copies_count, first_count, takes_count, own_count, moves_count, last_count, buffers_count;
    int size;               /* size of the group */
    int is_small;           /* true if all contributions fit into small slots */
    int is_private, target; /* target: the buffer that receives the reduction; -1 if there is none */
    Pair *copies, *own, *moves;
    Contribution *first, *last;
    Take *takes;
    npy_intp *needed; /* for each buffer, its minimum size in bytes */
    npy_intp nbytes_folded;
    npy_intp itemsize;
    PyArray_Descr *storage;
    PyUFuncGenericFunction loop;
    void *loop_data;
    /* Only for a relay: the elements per chunk (0 without a relay), the regions to send and to receive, the regions
       that received data is reduced with, and the target and source of a local copy. */
    npy_intp chunk;
    int behind; /* number of steps by which sends follow receives */
    Way outward, inward, operands, local;
    /* Row of this call kind in the table of counters. Valid until a link of the group changes. */
    npy_intp row;
    double nbytes;
    uint64_t epoch;
} Steps;

struct Calls;

/* Progress of the sending or receiving end of a relay: the next chunk, in the order of `shm_ring.order`, and the
   number of chunks before it. */
typedef struct {
    npy_intp count, column;
    int step;
} Cursor;

/* Additional state of a call that uses the ring of chunk queues. The Python class is `ShmRing`. */
typedef struct {
    Cursor put, taken;
    npy_intp copied; /* number of copied elements of the local copy */
    int left, right;
    int holds;     /* true while the call holds the queue to the right neighbour */
    int streams;   /* true if received data is written past the caches */
    char *bytes[]; /* for each buffer, its memory */
} Relay;

/* The base class of `Work`. A work that C code carries out has `calls`, and has no completion until Python requests
   one. */
typedef struct Handle {
    PyObject_HEAD PyObject *completion, *owner; /* owner: the dispatcher, which lives at least as long as its works */
    struct Calls *calls;
    struct Handle *previous, *next; /* neighbours in the linked list of calls in flight */
    struct Block *block;            /* the block of a recorded call, until the call ends */
    Steps *steps;
    Relay *relay;
    PyObject *arrays, *value, *key, *shape, *code, *waiters, *guard;
    uint64_t identity;
    int64_t seq; /* sequence number; -1 for none */
    double entered, limit;
    int instruction, seen, missing;
    char is_in_flight, is_posted, is_done; /* is_posted: false while the call waits for a slot */
} Handle;

/* The journal of a group. aiocoll/engine/journal.py describes the layout. */
typedef struct {
    PyObject *journal, *ring, *objects;
    Py_buffer records, counters, waits, ring_state, counters_state, waits_state, due;
    int64_t records_generation, counters_generation, waits_generation;
    int counts;
    npy_intp *wait_rows; /* for each rank, its row of waits; -1 if unknown */
} JournalView;

/* Forms of the arguments of a call on plain arrays: no array; one array; two arrays, one of which has one part per
   rank; lists of arrays. */
enum { NOTHING, ONE, PARTS, LISTS };
typedef struct {
    int form;
    PyObject *kind, *op, *root, *array, *other; /* other: only for PARTS */
    PyObject *blocks, *others;                  /* only for LISTS; `array` is then the first of `others` */
} Asked;

/* An entry of the call cache: an earlier call, with the properties that identify equal calls. */
enum { KNOWN = 64, WAYS = 4, DIMENSIONS = 4 };
typedef struct {
    int form, dimensions, other_dimensions, has_blocks;
    int gives_whole, gives_list; /* whether the result is the array with one part per rank; whether it is a list */
    npy_intp shape[2 * DIMENSIONS];
    PyArray_Descr *dtype;
    PyObject *kind, *op, *root, *main_shape; /* main_shape: the shape of the call's main array */
    Steps *steps;
} Known;

/* A cached code object, with the answer whether it is outside of this package. */
enum { SITES = 64 };
typedef struct {
    PyObject *code;
    int is_user; /* true if the code is outside of this package: user code */
} Site;

/* Indices in the group's `gate` array, which aiocoll/engine/communicator.py describes. */
enum { ENTERED, BARRED, DIVERTS, GATE };

/* The calls of one group that C code carries out. */
typedef struct Calls {
    PyObject_HEAD PyObject *comm, *owner, *work_type, *resolve, *make_steps, *find_one, *find_parts, *flatten,
        *find_lists, *find_barrier, *remember, *operation, *guard, *overwritten, *scope;
    PyObject *left, *early, *asked_early, *hooks, *due, *watch, *runtime, *polling, *is_running, *create_future,
        *stop_polling, *quiet, *wait, *lookers, *folder, *progress; /* hooks and due: lists that Python code changes */
    allocfunc allocate;
    PeerLanes **peers;
    Handle *first, *last, *first_waiting; /* list of calls in flight, with those that wait for a slot at its end */
    Py_ssize_t count, waiting, relays;
    uint64_t moved;  /* number of chunks sent or received so far */
    double deadline; /* time at which relays must stop moving chunks, so that the event loop can run */
    int gave_up;     /* true after calls waited too long for slots; then no call waits, until one finds a free slot */
    JournalView journal;
    uint64_t group, epoch;
    uint64_t asked; /* number of calls so far to Python functions that may have changed the state */
    uint32_t shift;
    int rank, size, is_crowded, shares_core, watches;
    unsigned long thread, forks; /* forks: `forks_of_process` when the group was made */
    double spin;
    Py_buffer turn, armed, gate; /* turn: time of the last loop iteration; armed: whether the timer of `watch` runs */
    char *scratch;
    npy_intp scratch_nbytes;
    PyObject *timeout; /* the default timeout; another object after each change */
    double limit;
    Known known[KNOWN + WAYS - 1];
    Site sites[SITES];
} Calls;

/* The calls of a coalescing block, which C code records. At the end of the block, C code starts them as children of
   a Python operation, the flush. */
typedef struct Block {
    PyObject_HEAD Calls *calls;
    PyObject *recording, *members; /* Python objects: the recording, which creates completions, and its list of calls */
    PyObject *flush;
    uint64_t root, first; /* ids of the flush and of the first call in the block */
    int is_ordered;       /* true if the flush has no key */
    Py_ssize_t left;      /* number of the block's calls in flight in C, plus one while more calls are being started */
    Py_ssize_t low; /* the flush starts more calls when at most this many are left; 0 if the flush is not paused */
    double limit;   /* the shortest timeout of the block's calls, in seconds */
} Block;

extern PyTypeObject *CommonLane_type, *PeerLanes_type, *Steps_type, *Handle_type, *Calls_type, *Iteration_type,
    *Block_type;
extern PyType_Spec CommonLane_spec, PeerLanes_spec, Steps_spec, Handle_spec, Calls_spec, Iteration_spec, Block_spec;

/* Casts for macros of Python's limited API, which accept only `PyObject *`. */
#define TYPE_OF(object) Py_TYPE((PyObject *)(object))
#define KEEP(object) Py_XINCREF((PyObject *)(object))
#define DROP(object) Py_XDECREF((PyObject *)(object))

/* Store a new reference in `place`, then drop the old reference. */
#define SET_REFERENCE(place, value)                                                                                    \
    do {                                                                                                               \
        PyObject *old_ = (PyObject *)(place);                                                                          \
        (place) = (void *)(value);                                                                                     \
        DROP(old_);                                                                                                    \
    } while (0)

/* Interned names of attributes that most calls look up. */
extern PyObject *name_back, *name_barrier, *name_closed, *name_default_timeout, *name_group, *name_least_timeout,
    *name_shape, *name_file, *name_instruction, *name_interceptor, *name_native, *name_spun, *name_steps;

/* Free the memory of an object of a heap type: the last step of a `dealloc` function. */
static inline void free_object(void *object) {
    PyTypeObject *type = TYPE_OF(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    DROP(type);
}

/* copying.c */
void copy_bytes(char *target, const char *source, npy_intp nbytes);
void copy_past_caches(char *target, const char *source, npy_intp nbytes);
void copy_to_reader(int *far, char *target, const char *source, npy_intp nbytes);

/* lanes.c */
static inline char *slot_bytes(const Slots *slots, uint32_t slot, npy_intp nbytes) {
    if (nbytes <= INLINE_NBYTES) return (char *)(slots->lines + slot * LINE_WORDS + LINE_BYTES);
    if (slot < LAYOUT_SMALL_SLOTS) return slots->base + slots->small + slot * slots->small_nbytes;
    return slots->base + slots->middle + (slot - LAYOUT_SMALL_SLOTS) * slots->middle_nbytes;
}
static inline npy_intp slot_nbytes(const Slots *slots, uint32_t slot) {
    return slot < LAYOUT_SMALL_SLOTS ? slots->small_nbytes : slots->middle_nbytes;
}
typedef struct {
    uint32_t slot;
    Head head;
    const char *bytes;
} Post;
uint64_t group_of_slot(const Slots *slots, uint32_t slot);
int lane_is_free(PeerLanes *peer, uint32_t slot);
int lane_has(const PeerLanes *peer, uint32_t slot, npy_intp nbytes);
int lane_reserve(PeerLanes *peer, uint32_t slot, npy_intp nbytes);
void lane_post(PeerLanes *peer, const Post *post);
int common_is_free(CommonLane *common, uint32_t slot);
int common_has(const CommonLane *common, uint32_t slot, npy_intp nbytes);
int common_reserve(CommonLane *common, uint32_t slot, npy_intp nbytes);
int common_post(const Post *post, PeerLanes **peers, int count, PyObject *lanes);
int lane_look(PeerLanes *peer, int is_common, uint32_t slot, const Head *expected, int compares_length);
int lane_free(PeerLanes *peer, int is_common, uint32_t slot, uint64_t group);
int queue_is_ready(PeerLanes *peer);
int poll_soon(PeerLanes *peer);
void wake(PeerLanes *peer);
int shares_core(PeerLanes *peer);
void note_core(PeerLanes *peer);
void pin(PeerLanes *peer);
void unpin(PeerLanes *peer);

/* steps.c */
char *buffer_bytes(Handle *call, int buffer);
int fold(Handle *call, char **found);

/* relay.c */
#define BUDGET 300e-6 /* maximum seconds per callback for moving chunks */
int relay_open(Handle *call);
void relay_close(Handle *call);
int relay_is_startable(Handle *call);
int relay_move(Handle *call);
int relay_poll_soon(Handle *call);

/* journal.c */
int journal_open(JournalView *view, PyObject *journal, int size);
int journal_ended(Calls *calls, Handle *call, double now);
void journal_close(JournalView *view);

/* posting.c */
enum { CANNOT, CAN, IN_USE }; /* IN_USE: the slot still holds a post of this group that a reader has not consumed */
PyObject *owner_of(const Calls *calls);
int are_postable(Calls *calls, Contribution *contributions, int count, uint64_t identity);
int is_true(PyObject *object, PyObject *name);
PeerLanes *peer_of(Calls *calls, int rank);
int post_all(Handle *call, Contribution *contributions, int count);
int ring(Calls *calls, const Contribution *contributions, int count);
uint32_t slot_of(const Calls *calls, uint64_t identity, uint32_t first, uint32_t slots);

/* blocks.c */
PyObject *block_of(Calls *calls, PyObject *recording);
Block *block_here(Calls *calls);
int member_ended(Handle *call);
int take_member_over(Handle *call);
Handle *record(Block *block, Steps *steps, PyObject *arrays, PyObject *shape, PyObject *value, double limit);

/* in_flight.c */
int advance(Calls *calls);
int begin(Handle *call);
PyObject *buffers_of(Handle *call, PyObject *arrays);
int complete(Handle *call);
int crash(Calls *calls);
int hand_over(Handle *call);
void link_call(Handle *call);
int look_at(Handle *call);
int look_once(Handle *call);
int look_at_all(Calls *calls);
PyObject *operation_of(Handle *call, PyObject *given, PyObject *completion);
void unlink_call(Handle *call);

/* starting.c */
PyObject *Calls_barrier(Calls *calls, PyObject *const *args, Py_ssize_t count);
PyObject *Calls_lists(Calls *calls, PyObject *const *args, Py_ssize_t count);
PyObject *Calls_one(Calls *calls, PyObject *const *args, Py_ssize_t count);
PyObject *Calls_parts(Calls *calls, PyObject *const *args, Py_ssize_t count);
PyObject *Calls_start(Calls *calls, PyObject *const *args, Py_ssize_t count);
void clear_known(Known *known);
Handle *start(Calls *calls, Steps *steps, PyObject *arrays, PyObject *shape, PyObject *value, double limit,
              PyObject *key, PyObject **taken);
int watch(Calls *calls);
int are_arrays_right(const Steps *steps, PyObject *arrays);
int find_call_site(Calls *calls, Handle *call);
int is_quiet(const Calls *calls);
int is_ready(Handle *call);
int launch(Handle *call, int ready);
Handle *make_call(Calls *calls, Steps *steps, PyObject *arrays, PyObject *shape, PyObject *value, double limit,
                  PyObject *key);
Steps *steps_of(Calls *calls, PyObject *plan);
extern unsigned long forks_of_process;

/* polling.c */
int poll_for(Handle *call);

/* handle.c */
int handle_end(Handle *call);
int note_await(Handle *self);
PyObject *materialize(Handle *work);
PyObject *completion_of(Handle *work, PyObject *waiters, PyObject *guard);
extern PyObject *reference_await, *reference_done, *reference_result, *reference_exception, *make_completion;

#endif
