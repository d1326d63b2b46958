/* Relays: transfer of large arrays through the ring of chunk queues.

   Schedule, chunk order and memory are the same as in aiocoll/engine/operations/shm_ring.py, so each rank may run
   either implementation. If anything unusual happens to a call, such as a queue that another group uses, Python takes
   the call over. C code waits only for earlier calls of the same group that all ranks make in the same order. */
#include "accelerator.h"

enum { LAG = 2 };             /* number of chunk columns by which each step follows the previous step */
enum { STREAMED = 16 << 20 }; /* a call that writes this many bytes evicts its first bytes from all caches */

static npy_intp total_of(const Way *way) { return way->steps * way->chunks; }

/* Advance the cursor to the next chunk. Chunks are ordered by column, and within a column by descending step. */
static void next_chunk(const Way *way, Cursor *cursor) {
    if (++cursor->count == total_of(way)) return;
    do {
        if (cursor->step) {
            cursor->step--;
        } else {
            npy_intp deepest = ++cursor->column / LAG;
            cursor->step = deepest < way->steps ? (int)deepest : way->steps - 1;
        }
    } while (cursor->column - LAG * cursor->step >= way->chunks);
}

/* Return whether the next chunk can be sent: if it depends on a received chunk, that chunk must have arrived. */
static int is_due(const Handle *call) {
    const Cursor *put = &call->relay->put, *taken = &call->relay->taken;
    int behind = call->steps->behind;
    if (put->step < behind || taken->count == total_of(&call->steps->inward)) return 1;
    npy_intp column = put->column - LAG * behind;
    return column < taken->column || (column == taken->column && put->step - behind > taken->step);
}

typedef struct {
    char *bytes;
    npy_intp count;
} Piece;

/* Return the address and the length of a chunk of a region. The length may be 0. */
static Piece piece_of(const Handle *call, const Region *region, npy_intp chunk) {
    const Steps *steps = call->steps;
    npy_intp first = chunk * steps->chunk;
    if (first > region->count) first = region->count;
    npy_intp count = region->count - first < steps->chunk ? region->count - first : steps->chunk;
    return (Piece){call->relay->bytes[region->buffer] + (region->start + first) * steps->itemsize, count};
}

static Piece piece_at(const Handle *call, const Way *way, const Cursor *cursor) {
    return piece_of(call, way->regions + cursor->step, cursor->column - LAG * cursor->step);
}

static Word *line_of(const Queue *queue, uint64_t number) {
    return queue->lines + (number - 1) % queue->count * LINE_WORDS;
}
static char *bytes_of(const PeerLanes *peer, const Queue *queue, uint64_t number) {
    return queue->chunks + (number - 1) % queue->count * peer->chunk_nbytes;
}

/* Copy received bytes to `target`, past the caches if the call streams. */
static void copy_to_target(const Handle *call, char *target, const char *source, npy_intp nbytes) {
    if (call->relay->streams) copy_past_caches(target, source, nbytes);
    else copy_bytes(target, source, nbytes);
}

/* ---- the queue to the right neighbour */

static int is_ordered(const Handle *call) { return call->key == Py_None; }

/* Return whether no operation holds the queue, and the reader will consume all chunks that the queue still contains. */
static int is_free(const Handle *call, const Queue *queue) {
    if (queue->state[LAYOUT_CHUNK_HOLDER]) return 0;
    uint64_t taken = load_acquire(queue->taken);
    if (taken == queue->state[LAYOUT_CHUNK_NUMBER] || taken > queue->state[LAYOUT_CHUNK_FIRST]) return 1;
    return is_ordered(call) && queue->state[LAYOUT_CHUNK_HOLDER_GROUP] == call->calls->group &&
           queue->state[LAYOUT_CHUNK_LAST] < call->identity;
}

/* Return whether an earlier ordered call of this group holds the queue: all ranks carry out that call first. The ids
   of ordered calls are their sequence numbers, which are smaller than the ids of keyed calls. */
static int is_next_in_line(const Handle *call, const Queue *queue) {
    uint64_t holder = queue->state[LAYOUT_CHUNK_HOLDER];
    return is_ordered(call) && holder && holder < call->identity &&
           queue->state[LAYOUT_CHUNK_HOLDER_GROUP] == call->calls->group;
}

static int is_behind_another(const Handle *call) {
    for (Handle *each = call->previous; each && is_ordered(call); each = each->previous)
        if (each->relay && is_ordered(each) && each->relay->put.count < total_of(&each->steps->outward)) return 1;
    return 0;
}

/* Reserve the queue for a call. Return 0 if the call must still wait for the queue, -1 if the call must be handed
   over to Python. */
static int take_queue(Handle *call, Queue *queue) {
    if (is_behind_another(call) || is_next_in_line(call, queue)) return 0;
    if (!is_free(call, queue)) return -1;
    queue->state[LAYOUT_CHUNK_FIRST] = queue->state[LAYOUT_CHUNK_NUMBER];
    queue->state[LAYOUT_CHUNK_HOLDER] = call->identity;
    queue->state[LAYOUT_CHUNK_HOLDER_GROUP] = call->calls->group;
    return call->relay->holds = 1;
}

static void leave_queue(Handle *call, PeerLanes *right) {
    right->out.state[LAYOUT_CHUNK_HOLDER] = 0;
    right->out.state[LAYOUT_CHUNK_LAST] = call->identity;
    call->relay->holds = 0;
    finish_chunks(right->words + LAYOUT_CHUNKED);
}

/* Send the next chunk. Return 1 if it was sent, 0 if it cannot be sent yet, -1 if the call must be handed over. */
static int put_next(Handle *call, PeerLanes *right) {
    Relay *relay = call->relay;
    Queue *queue = &right->out;
    const Way *puts = &call->steps->outward;
    if (relay->put.count == total_of(puts) || !is_due(call)) return 0;
    if (!relay->holds) {
        int taken = take_queue(call, queue);
        if (taken <= 0) return taken;
    }
    uint64_t number = queue->state[LAYOUT_CHUNK_NUMBER] + 1;
    if (number > (uint64_t)queue->count && !are_taken(queue->taken, queue->waiting, number - queue->count)) return 0;
    Piece piece = piece_at(call, puts, &relay->put);
    npy_intp length = puts->regions[relay->put.step].count * call->steps->itemsize;
    Chunk chunk = {call->identity, call->calls->group, call->steps->fingerprint, (uint64_t)length};
    copy_to_reader(&queue->far, bytes_of(right, queue, number), piece.bytes, piece.count * call->steps->itemsize);
    put_chunk(line_of(queue, number), &chunk, number);
    queue->state[LAYOUT_CHUNK_NUMBER] = number;
    next_chunk(puts, &relay->put);
    if (relay->put.count == total_of(puts)) leave_queue(call, right);
    fence_full();
    wake(right);
    return 1;
}

/* ---- the queue from the left neighbour */

static void use(const Handle *call, char *incoming) {
    const Steps *steps = call->steps;
    const Cursor *taken = &call->relay->taken;
    Piece piece = piece_at(call, &steps->inward, taken);
    if (taken->step >= steps->operands.steps) {
        copy_to_target(call, piece.bytes, incoming, piece.count * steps->itemsize);
    } else if (piece.count) {
        char *arguments[3] = {incoming, piece_at(call, &steps->operands, taken).bytes, piece.bytes};
        npy_intp strides[3] = {steps->itemsize, steps->itemsize, steps->itemsize};
        steps->loop(arguments, &piece.count, strides, steps->loop_data);
    }
}

/* Receive the next chunk. Return 1 if it was received, 0 if it has not arrived yet, -1 if the call must be handed
   over. */
static int take_next(Handle *call, PeerLanes *left) {
    Relay *relay = call->relay;
    Queue *queue = &left->in;
    if (relay->taken.count == total_of(&call->steps->inward)) return 0;
    uint64_t number = queue->state[LAYOUT_CHUNK_NUMBER];
    Word *line = line_of(queue, number);
    if (!has_chunk(line, number)) return 0;
    if (load(line + CHUNK_GROUP) != call->calls->group) return queue->state[LAYOUT_CHUNK_GROUPS_OVER] ? -1 : 0;
    if (load(line + CHUNK_IDENTITY) != call->identity) return 0;
    npy_intp length = call->steps->inward.regions[relay->taken.step].count * call->steps->itemsize;
    if (load(line + CHUNK_FINGERPRINT) != call->steps->fingerprint) return -1;
    if (load(line + CHUNK_LENGTH) != (uint64_t)length) return -1;
    if (load(line + CHUNK_SEGMENT)) return -1; /* only Python reads chunks that were sent by reference */
    use(call, bytes_of(left, queue, number));
    queue->state[LAYOUT_CHUNK_NUMBER] = number + 1;
    if (take_chunk(queue->taken, queue->waiting, number)) wake(left);
    next_chunk(&call->steps->inward, &relay->taken);
    return 1;
}

/* ---- calls */

/* Copy the next chunk of the local copy; return 0 if the local copy is complete. */
static int copy_next(Handle *call) {
    const Way *local = &call->steps->local;
    npy_intp chunk = call->relay->copied / call->steps->chunk;
    if (!local->steps || call->relay->copied == local->regions[0].count) return 0;
    Piece target = piece_of(call, local->regions, chunk), source = piece_of(call, local->regions + 1, chunk);
    npy_intp nbytes = target.count * call->steps->itemsize;
    int is_apart = target.bytes + nbytes <= source.bytes || source.bytes + nbytes <= target.bytes;
    if (is_apart) copy_to_target(call, target.bytes, source.bytes, nbytes);
    else copy_bytes(target.bytes, source.bytes, nbytes);
    call->relay->copied += target.count;
    return 1;
}

static int has_moved_all(const Handle *call) {
    const Steps *steps = call->steps;
    const Relay *relay = call->relay;
    return relay->put.count == total_of(&steps->outward) && relay->taken.count == total_of(&steps->inward) &&
           (!steps->local.steps || relay->copied == steps->local.regions[0].count);
}

/* Send and receive chunks until none can be moved, or the time of this callback is used up. Can run without the GIL.
   Return values are those of `look_at`. */
int relay_move(Handle *call) {
    Calls *calls = call->calls;
    Relay *relay = call->relay;
    for (;;) {
        PeerLanes *left = calls->peers[relay->left], *right = calls->peers[relay->right];
        if (!left || !right || !left->can_look || !right->can_post || !left->chunk_nbytes || !right->chunk_nbytes)
            return -1;
        int put = put_next(call, right), taken = put < 0 ? -1 : take_next(call, left);
        if (taken < 0) return -1;
        int moved = put + taken;
        if (!moved) moved = copy_next(call);
        calls->moved += moved;
        if (has_moved_all(call)) return 1;
        if (!moved) return 0;
        if (seconds() > calls->deadline) return 0;
    }
}

/* Return whether received data should bypass the caches: it is large, and this rank does not read it again. */
static int streams(const Steps *steps) {
    if (steps->operands.steps || steps->outward.steps > steps->behind) return 0;
    npy_intp count = steps->local.steps ? steps->local.regions[0].count : 0;
    for (int step = 0; step < steps->inward.steps; step++) count += steps->inward.regions[step].count;
    return count * steps->itemsize >= STREAMED;
}

/* Allocate and initialize the relay state of a call that is not in flight yet. */
int relay_open(Handle *call) {
    Calls *calls = call->calls;
    const Steps *steps = call->steps;
    Relay *relay = call->relay = PyMem_Calloc(1, sizeof *relay + steps->buffers_count * sizeof *relay->bytes);
    if (!relay) return PyErr_NoMemory(), -1;
    relay->left = (calls->rank + calls->size - 1) % calls->size;
    relay->right = (calls->rank + 1) % calls->size;
    for (int i = 0; i < steps->buffers_count; i++)
        if (steps->needed[i]) relay->bytes[i] = buffer_bytes(call, i);
    if (steps->inward.steps) call->missing = relay->left;
    relay->streams = streams(steps);
    return 0;
}

void relay_close(Handle *call) {
    PyMem_Free(call->relay);
    call->relay = NULL;
}

/* Return CAN if a call can use both queues, now or after earlier calls of its group; otherwise CANNOT. See
   `is_ready`. */
int relay_is_startable(Handle *call) {
    Calls *calls = call->calls;
    npy_intp nbytes = call->steps->chunk * call->steps->itemsize;
    PeerLanes *left = peer_of(calls, call->relay->left), *right = left ? peer_of(calls, call->relay->right) : NULL;
    if (!right) return PyErr_Occurred() ? -1 : CANNOT;
    if (!right->chunk_nbytes || !left->chunk_nbytes || nbytes > right->chunk_nbytes || nbytes > left->chunk_nbytes)
        return CANNOT;
    if (!call->steps->outward.steps) return CAN;
    if (!right->out.state[LAYOUT_CHUNK_READY]) {
        calls->asked++;
        int is_there = queue_is_ready(right);
        if (is_there <= 0) return is_there < 0 ? -1 : CANNOT;
    }
    return is_free(call, &right->out) || is_next_in_line(call, &right->out) ? CAN : CANNOT;
}

/* Make this rank check its links in the next loop iteration. */
int relay_poll_soon(Handle *call) {
    PeerLanes *right = call->calls->peers[call->relay->right];
    return right && right->can_post ? poll_soon(right) : 0;
}
