/* The types of the accelerator, and what its files offer each other. */
#ifndef AIOCOLL_ACCELERATOR_H
#define AIOCOLL_ACCELERATOR_H

#if !defined(Py_LIMITED_API) || !defined(NPY_TARGET_VERSION)
#error "hatch_build.py sets the versions of both interfaces"
#endif

#define PY_SSIZE_T_CLEAN
#define PY_ARRAY_UNIQUE_SYMBOL aiocoll_array_api
#define PY_UFUNC_UNIQUE_SYMBOL aiocoll_ufunc_api
#ifndef IMPORTS_NUMPY /* by module.c */
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

#define INLINE_NBYTES ((LINE_WORDS - LINE_BYTES) * 8) /* bytes of a contribution that lie in its line */
#define NO_PEER (-1)

enum { TRIES = 3 }; /* how often it is looked again after functions of Python were asked */

/* Slots of one lane: lines of eight words, and the bytes of contributions that do not fit there. */
typedef struct {
    char *base;
    Word *lines;
    npy_intp small, small_nbytes, middle, middle_nbytes;
    int far; /* how many of the next posts are written past the caches */
} Slots;

/* The common lane of this rank's outbox. */
typedef struct {
    PyObject_HEAD Py_buffer memory, posted, ready;
    Slots slots;
    uint64_t *numbers; /* of the last post of each slot */
    char *is_reserved; /* whether the memory of each slot is there */
    PyObject *readers; /* list: of the last post of each slot, the lanes of its readers */
    PyObject *reserve; /* function of Python: makes the memory of a slot */
} CommonLane;

/* One end of a chunk queue. */
typedef struct {
    char *chunks;
    Word *lines, *taken, *waiting;
    uint64_t *state;
    npy_intp count; /* of the chunks that it holds */
    int far;        /* how many of the next chunks are written past the caches */
} Queue;

/* This rank's lane for one peer, and what the peer has for this rank. */
typedef struct {
    PyObject_HEAD Py_buffer memory, posted, ready, theirs, status;
    Py_buffer region, out_state, in_state; /* of the chunk queues */
    Queue out, in;
    npy_intp chunk_nbytes; /* 0: there are no queues */
    PyObject *reserve_queue;
    Slots slots, common_slots, lane_slots; /* of this rank; of the peer */
    Word *words, *peer_words;              /* of both lanes */
    Word *own_status, *peer_status;
    uint64_t *numbers, rung;
    char *is_reserved;
    PyObject *reserve, *attend, *writer;
    CommonLane *common;
    int eventfd, has_lines;
    int can_post; /* the link is open, and the one that is used */
    int can_look; /* the link is open */
    int pins;     /* who uses the memory while Python may run; `close` leaves it to the last of them */
} PeerLanes;

typedef struct {
    int buffer, is_common, readers_count, *readers;
    npy_intp nbytes;
    uint32_t first_slot, slots;
    /* The lanes of the readers, as the common lane keeps them, as long as the links of the group stay. */
    PyObject *lanes;
    uint64_t epoch;
} Contribution;

typedef struct {
    int peer, is_common;
    npy_intp nbytes;
    uint32_t first_slot, slots;
} Take;

/* Two numbers: of a copy, target and source; of a move, the take and its target; of this rank's own input, its place
   among the inputs of a reduction and its buffer. */
typedef struct {
    int first, second;
} Pair;

/* Elements of a buffer. */
typedef struct {
    int buffer;
    npy_intp start, count;
} Region;

/* One direction of a relay: a region for each step, and the chunks of each. */
typedef struct {
    Region *regions;
    int steps;
    npy_intp chunks;
} Way;

/* What one rank does in a collective of one round, or in a relay: `Round` and `Relay` of Python. */
typedef struct {
    PyObject_HEAD PyObject *plan, *kind, *op, *signature,
        *fold; /* fold: function of Python, of what `loop` does not do */
    uint64_t fingerprint;
    int copies_count, first_count, takes_count, own_count, moves_count, last_count, buffers_count;
    int size;               /* of its group */
    int is_small;           /* all contributions lie in small slots */
    int is_private, target; /* target: buffer that is reduced into; -1: none */
    Pair *copies, *own, *moves;
    Contribution *first, *last;
    Take *takes;
    npy_intp *needed; /* bytes that each buffer has at least */
    npy_intp nbytes_folded;
    npy_intp itemsize;
    PyArray_Descr *storage;
    PyUFuncGenericFunction loop;
    void *loop_data;
    /* Of a relay: elements of a chunk, else 0; what goes, and comes; what that is reduced with; a copy's two regions.
     */
    npy_intp chunk;
    int behind; /* how many steps a rank passes on what has come behind */
    Way outward, inward, operands, local;
    /* Where its calls are counted, as long as the links of the group stay. */
    npy_intp row;
    double nbytes;
    uint64_t epoch;
} Steps;

struct Calls;

/* Where an end of a relay is: the next chunk, in the order of `shm_ring.order`, and how many came before. */
typedef struct {
    npy_intp count, column;
    int step;
} Cursor;

/* What a call that goes through the ring of chunk queues needs besides; `ShmRing` of Python. */
typedef struct {
    Cursor put, taken;
    npy_intp copied; /* elements */
    int left, right;
    int holds;     /* the queue to the right */
    int streams;   /* what comes is written past the caches */
    char *bytes[]; /* of the buffers */
} Relay;

/* The base of `Work`. A work that is carried out here has `calls`, and no completion until Python asks for one. */
typedef struct Handle {
    PyObject_HEAD PyObject *completion, *owner; /* owner: the dispatcher, which lives as long as its works */
    struct Calls *calls;
    struct Handle *previous, *next; /* in flight */
    struct Block *block;            /* of a call of a block, before its end */
    Steps *steps;
    Relay *relay;
    PyObject *arrays, *value, *key, *shape, *code, *waiters, *guard;
    uint64_t identity;
    int64_t seq; /* -1: none */
    double entered, limit;
    int instruction, seen, missing;
    char is_in_flight, is_posted, is_done; /* is_posted: else it waits for a slot */
} Handle;

/* The journal of a group; see aiocoll/engine/journal.py for the layout. */
typedef struct {
    PyObject *journal, *ring, *objects;
    Py_buffer records, counters, waits, ring_state, counters_state, waits_state, due;
    int64_t records_generation, counters_generation, waits_generation;
    int counts;
    npy_intp *wait_rows; /* by rank; -1: not known */
} JournalView;

/* What a call on plain arrays is made with: no array, one, two of which one has a part per rank, or lists. */
enum { NOTHING, ONE, PARTS, LISTS };
typedef struct {
    int form;
    PyObject *kind, *op, *root, *array, *other; /* other: of PARTS */
    PyObject *blocks, *others;                  /* of LISTS; array is the first one of `others` */
} Asked;

/* A call like an earlier one, by what identifies it. */
enum { KNOWN = 64, WAYS = 4, DIMENSIONS = 4 };
typedef struct {
    int form, dimensions, other_dimensions, has_blocks;
    int gives_whole, gives_list; /* the result is what has a part per rank; a list */
    npy_intp shape[2 * DIMENSIONS];
    PyArray_Descr *dtype;
    PyObject *kind, *op, *root, *main_shape; /* main_shape: of the array that the call is about */
    Steps *steps;
} Known;

/* A code object in which a call was made, or on the way to one. */
enum { SITES = 64 };
typedef struct {
    PyObject *code;
    int is_user; /* whether it is outside of the package */
} Site;

/* The gate of a group; see aiocoll/engine/communicator.py. */
enum { ENTERED, BARRED, DIVERTS, GATE };

/* The calls of one group that are carried out here. */
typedef struct Calls {
    PyObject_HEAD PyObject *comm, *owner, *work_type, *resolve, *make_steps, *find_one, *find_parts, *flatten,
        *find_lists, *find_barrier, *remember, *operation, *guard, *overwritten, *scope;
    PyObject *left, *early, *asked_early, *hooks, *due, *watch, *runtime, *polling, *is_running, *create_future, *rest,
        *quiet, *wait, *lookers, *folder, *progress; /* hooks and due: lists, which Python changes */
    allocfunc allocate;
    PeerLanes **peers;
    Handle *first, *last, *first_waiting; /* in flight; those that wait for a slot come last */
    Py_ssize_t count, waiting, relays;
    uint64_t moved;  /* how many chunks have been put or taken */
    double deadline; /* until when they may, without a turn of the loop */
    int gave_up;     /* calls waited too long for slots: none waits until one finds a slot free */
    JournalView journal;
    uint64_t group, epoch;
    uint64_t asked; /* how often functions of Python were asked that may have changed anything */
    uint32_t shift;
    int rank, size, is_crowded, is_beside, watches;
    unsigned long thread, forks; /* forks: of this process, when the group was made */
    double spin;
    Py_buffer turn, armed, gate; /* turn: when the loop had its last one; armed: whether the timer of `watch` runs */
    char *scratch;
    npy_intp scratch_nbytes;
    PyObject *timeout; /* the default one; a later one is another object */
    double limit;
    Known known[KNOWN + WAYS - 1];
    Site sites[SITES];
} Calls;

/* The calls of a block: recorded here, and later in flight, as children of an operation of Python, the flush. */
typedef struct Block {
    PyObject_HEAD Calls *calls;
    PyObject *recording, *members; /* of Python: makes completions; its list of calls */
    PyObject *flush;
    uint64_t root, first; /* ids of the flush, and of what its first member would be */
    int is_ordered;       /* the flush has no key */
    Py_ssize_t left;      /* in flight here; and one while more are started */
    Py_ssize_t low;       /* the flush goes on to start members when so few are left; 0: it does not wait for that */
    double limit;         /* seconds that any of them may take */
} Block;

extern PyTypeObject *CommonLane_type, *PeerLanes_type, *Steps_type, *Handle_type, *Calls_type, *Iteration_type,
    *Block_type;
extern PyType_Spec CommonLane_spec, PeerLanes_spec, Steps_spec, Handle_spec, Calls_spec, Iteration_spec, Block_spec;

/* The macros of the limited API take objects only. */
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
int attend(PeerLanes *peer);
void wake(PeerLanes *peer);
int is_beside(PeerLanes *peer);
void note_core(PeerLanes *peer);
void pin(PeerLanes *peer);
void unpin(PeerLanes *peer);

/* steps.c */
char *buffer_bytes(Handle *call, int buffer);
int fold(Handle *call, char **found);

/* relay.c */
#define BUDGET 300e-6 /* seconds that one callback may take */
int relay_open(Handle *call);
void relay_close(Handle *call);
int relay_is_startable(Handle *call);
int relay_move(Handle *call);
int relay_attend(Handle *call);

/* journal.c */
int journal_open(JournalView *view, PyObject *journal, int size);
int journal_ended(Calls *calls, Handle *call, double now);
void journal_close(JournalView *view);

/* posting.c */
enum { CANNOT, CAN, IN_USE }; /* whether something can be posted; its slot has a call of this group that is read late */
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
void forget(Known *known);
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
