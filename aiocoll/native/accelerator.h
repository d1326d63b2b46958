/* Types of the accelerator, and the functions that its files share. */
#ifndef AIOCOLL_ACCELERATOR_H
#define AIOCOLL_ACCELERATOR_H

#if !defined(Py_LIMITED_API) || !defined(NPY_TARGET_VERSION)
#error "hatch_build.py sets the versions of both interfaces"
#endif

#define PY_SSIZE_T_CLEAN
#define PY_ARRAY_UNIQUE_SYMBOL aiocoll_array_api
#define PY_UFUNC_UNIQUE_SYMBOL aiocoll_ufunc_api
#ifndef IMPORTS_NUMPY /* set by module.c */
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

#define INLINE_NBYTES ((LINE_WORDS - LINE_BYTES) * 8) /* bytes of a contribution that fit into its line */
#define NO_PEER (-1)

enum { TRIES = 3 }; /* attempts after calls to Python functions, which may have changed the state */

/* Slots of one lane: lines of eight words, and memory for contributions that do not fit into their lines. */
typedef struct {
    char *base;
    Word *lines;
    npy_intp small, small_nbytes, middle, middle_nbytes;
    int far; /* number of the next posts that bypass the caches */
} Slots;

/* The common lane of this rank's outbox. */
typedef struct {
    PyObject_HEAD Py_buffer memory, posted, ready;
    Slots slots;
    uint64_t *numbers; /* by slot, the number of its last post */
    char *is_reserved; /* by slot, whether its memory is allocated */
    PyObject *readers; /* list: by slot, the lanes of the last post's readers */
    PyObject *reserve; /* Python function that allocates the memory of a slot */
} CommonLane;

/* One end of a chunk queue. */
typedef struct {
    char *chunks;
    Word *lines, *taken, *waiting;
    uint64_t *state;
    npy_intp count; /* number of chunks in the queue */
    int far;        /* number of the next chunks that bypass the caches */
} Queue;

/* The lanes between this rank and one peer: this rank's lane for the peer, and both lanes of the peer. */
typedef struct {
    PyObject_HEAD Py_buffer memory, posted, ready, theirs, status;
    Py_buffer region, out_state, in_state; /* buffers of the chunk queues */
    Queue out, in;
    npy_intp chunk_nbytes; /* 0 without queues */
    PyObject *reserve_queue;
    Slots slots, common_slots, lane_slots; /* of this rank; of the peer */
    Word *words, *peer_words;              /* words of both lanes */
    Word *own_status, *peer_status;
    uint64_t *numbers, rung;
    char *is_reserved;
    PyObject *reserve, *poll_soon, *writer;
    CommonLane *common;
    int eventfd, has_lines;
    int can_post; /* true if the link is open and in use */
    int can_look; /* true if the link is open */
    int pins;     /* number of users of the memory while Python may run; after `close`, the last one releases it */
} PeerLanes;

typedef struct {
    int buffer, is_common, readers_count, *readers;
    npy_intp nbytes;
    uint32_t first_slot, slots;
    /* Lanes of the readers, in the form that the common lane stores, valid until the links of the group change. */
    PyObject *lanes;
    uint64_t epoch;
} Contribution;

typedef struct {
    int peer, is_common;
    npy_intp nbytes;
    uint32_t first_slot, slots;
} Take;

/* Two numbers. Copy: target and source. Move: take and target. This rank's own input: its index among the inputs of
   a reduction, and its buffer. */
typedef struct {
    int first, second;
} Pair;

/* Elements of a buffer. */
typedef struct {
    int buffer;
    npy_intp start, count;
} Region;

/* One direction of a relay: one region per step, and the number of chunks per region. */
typedef struct {
    Region *regions;
    int steps;
    npy_intp chunks;
} Way;

/* The actions of one rank in a collective of one round, or in a relay: `Round` and `Relay` of Python. */
typedef struct {
    PyObject_HEAD PyObject *plan, *kind, *op, *signature, *fold; /* fold: Python function, used if there is no `loop` */
    uint64_t fingerprint;
    int copies_count, first_count, takes_count, own_count, moves_count, last_count, buffers_count;
    int size;               /* of its group */
    int is_small;           /* true if all contributions fit into small slots */
    int is_private, target; /* target: buffer that receives the reduction; -1 for none */
    Pair *copies, *own, *moves;
    Contribution *first, *last;
    Take *takes;
    npy_intp *needed; /* by buffer, its minimum size in bytes */
    npy_intp nbytes_folded;
    npy_intp itemsize;
    PyArray_Descr *storage;
    PyUFuncGenericFunction loop;
    void *loop_data;
    /* For a relay: elements per chunk (0 otherwise); regions to send, to receive, and to reduce received data with;
       target and source of a copy. */
    npy_intp chunk;
    int behind; /* number of steps by which a rank's sends lag behind its receives */
    Way outward, inward, operands, local;
    /* Position of its counters, valid until the links of the group change. */
    npy_intp row;
    double nbytes;
    uint64_t epoch;
} Steps;

struct Calls;

/* Position of one end of a relay: the next chunk, in the order of `shm_ring.order`, and the number of earlier ones. */
typedef struct {
    npy_intp count, column;
    int step;
} Cursor;

/* Additional state of a call that uses the ring of chunk queues; `ShmRing` in Python. */
typedef struct {
    Cursor put, taken;
    npy_intp copied; /* elements */
    int left, right;
    int holds;     /* true while the call holds the queue to the right */
    int streams;   /* true if received data is written past the caches */
    char *bytes[]; /* by buffer, its memory */
} Relay;

/* The base class of `Work`. A work that is carried out here has `calls`, and no completion until Python requests
   one. */
typedef struct Handle {
    PyObject_HEAD PyObject *completion, *owner; /* owner: the dispatcher, which lives as long as its works */
    struct Calls *calls;
    struct Handle *previous, *next; /* neighbours in the list of calls in flight */
    struct Block *block;            /* the block of a recorded call, before its end */
    Steps *steps;
    Relay *relay;
    PyObject *arrays, *value, *key, *shape, *code, *waiters, *guard;
    uint64_t identity;
    int64_t seq; /* -1 for none */
    double entered, limit;
    int instruction, seen, missing;
    char is_in_flight, is_posted, is_done; /* is_posted: false while the call waits for a slot */
} Handle;

/* The journal of a group. See aiocoll/engine/journal.py for the layout. */
typedef struct {
    PyObject *journal, *ring, *objects;
    Py_buffer records, counters, waits, ring_state, counters_state, waits_state, due;
    int64_t records_generation, counters_generation, waits_generation;
    int counts;
    npy_intp *wait_rows; /* by rank; -1 if unknown */
} JournalView;

/* Arguments of a call on plain arrays: no array; one array; two arrays, one of which has a part per rank; or lists. */
enum { NOTHING, ONE, PARTS, LISTS };
typedef struct {
    int form;
    PyObject *kind, *op, *root, *array, *other; /* other: for PARTS */
    PyObject *blocks, *others;                  /* for LISTS; array is the first one of `others` */
} Asked;

/* An earlier call, with the properties that identify equal calls. */
enum { KNOWN = 64, WAYS = 4, DIMENSIONS = 4 };
typedef struct {
    int form, dimensions, other_dimensions, has_blocks;
    int gives_whole, gives_list; /* the result is the array with a part per rank; the result is a list */
    npy_intp shape[2 * DIMENSIONS];
    PyArray_Descr *dtype;
    PyObject *kind, *op, *root, *main_shape; /* main_shape: shape of the call's main array */
    Steps *steps;
} Known;

/* A code object of a caller, inside or outside of the package. */
enum { SITES = 64 };
typedef struct {
    PyObject *code;
    int is_user; /* true if it is outside of the package */
} Site;

/* The gate of a group. See aiocoll/engine/communicator.py. */
enum { ENTERED, BARRED, DIVERTS, GATE };

/* The calls of one group that are carried out here. */
typedef struct Calls {
    PyObject_HEAD PyObject *comm, *owner, *work_type, *resolve, *make_steps, *find_one, *find_parts, *flatten,
        *find_lists, *find_barrier, *remember, *operation, *guard, *overwritten, *scope;
    PyObject *left, *early, *asked_early, *hooks, *due, *watch, *runtime, *polling, *is_running, *create_future,
        *stop_polling, *quiet, *wait, *lookers, *folder, *progress; /* hooks and due: lists that Python changes */
    allocfunc allocate;
    PeerLanes **peers;
    Handle *first, *last, *first_waiting; /* in flight; calls that wait for a slot come last */
    Py_ssize_t count, waiting, relays;
    uint64_t moved;  /* number of chunks that have been put or taken */
    double deadline; /* end of the time for moving chunks without an iteration of the loop */
    int gave_up;     /* true if calls waited too long for slots; no call waits until one finds a free slot */
    JournalView journal;
    uint64_t group, epoch;
    uint64_t asked; /* number of calls to Python functions that may have changed the state */
    uint32_t shift;
    int rank, size, is_crowded, shares_core, watches;
    unsigned long thread, forks; /* forks: number of forks of this process when the group was made */
    double spin;
    Py_buffer turn, armed, gate; /* turn: time of the loop's last iteration; armed: whether the timer of `watch` runs */
    char *scratch;
    npy_intp scratch_nbytes;
    PyObject *timeout; /* the default timeout; after a change it is another object */
    double limit;
    Known known[KNOWN + WAYS - 1];
    Site sites[SITES];
} Calls;

/* The calls of a block: recorded here, and later in flight as children of a Python operation, the flush. */
typedef struct Block {
    PyObject_HEAD Calls *calls;
    PyObject *recording, *members; /* Python objects: the recording, which creates completions; its list of calls */
    PyObject *flush;
    uint64_t root, first; /* ids of the flush, and of its first member */
    int is_ordered;       /* true if the flush has no key */
    Py_ssize_t left;      /* number of calls in flight here, plus one while more are being started */
    Py_ssize_t low;       /* the flush starts more members when at most this many are left; 0 if it does not wait for
                             that */
    double limit;         /* the smallest timeout of the calls, in seconds */
} Block;

extern PyTypeObject *CommonLane_type, *PeerLanes_type, *Steps_type, *Handle_type, *Calls_type, *Iteration_type,
    *Block_type;
extern PyType_Spec CommonLane_spec, PeerLanes_spec, Steps_spec, Handle_spec, Calls_spec, Iteration_spec, Block_spec;

/* Macros of the limited API accept objects only. */
#define TYPE_OF(object) Py_TYPE((PyObject *)(object))
#define KEEP(object) Py_XINCREF((PyObject *)(object))
#define DROP(object) Py_XDECREF((PyObject *)(object))

/* Replace a reference. */
#define SET_REFERENCE(place, value)                                                                                    \
    do {                                                                                                               \
        PyObject *old_ = (PyObject *)(place);                                                                          \
        (place) = (void *)(value);                                                                                     \
        DROP(old_);                                                                                                    \
    } while (0)

/* Interned names of attributes that every call looks up. */
extern PyObject *name_back, *name_barrier, *name_closed, *name_default_timeout, *name_group, *name_least_timeout,
    *name_shape, *name_file, *name_instruction, *name_interceptor, *name_native, *name_spun, *name_steps;

/* Free an object of a heap type, the last step of its deallocation. */
static inline void free_object(void *object) {
    PyTypeObject *type = TYPE_OF(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    DROP(type);
}

/* copying.c */
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
#define BUDGET 300e-6 /* maximum time of one callback in seconds */
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
enum { CANNOT, CAN, IN_USE }; /* IN_USE: the slot has a call of this group that was not read yet */
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
