/* Polling: an await checks its call for some time before it suspends. aiocoll/engine/polling.py describes the rules. */
#include "accelerator.h"

#include <sched.h>

enum {
    LOOKS_WITH_INTERPRETER =
        64, /* number of checks (some 2 µs) before releasing the GIL, so that other threads may run */
    LOOKS_BEFORE_CORE_CHECK = 32, /* number of checks before testing whether a peer runs on this core */
    OTHERS = 8,                   /* number of checks between two checks of the group's other calls */
    CLOCK = 16                    /* number of checks between two readings of the clock */
};

static int has_neighbour(Calls *calls) {
    int found = 0;
    for (int i = 0; i < calls->size; i++)
        if (calls->peers[i] && calls->peers[i]->can_look) found |= shares_core(calls->peers[i]);
    return found;
}

/* Return whether any other posted call can end or must be handed over to Python. */
static int can_others_end(Calls *calls, const Handle *call) {
    for (Handle *each = calls->first; each != calls->first_waiting; each = each->next)
        if (each != call && look_at(each)) return 1;
    return 0;
}

/* State while the GIL is released. Other threads may then run and close links, so the memory of the links is pinned. */
typedef struct {
    PyThreadState *state;
    PeerLanes **pinned;
    int size;
} Released;

static void release(Calls *calls, Released *released) {
    if (released->state) return;
    for (int i = 0; i < released->size; i++)
        if ((released->pinned[i] = calls->peers[i])) pin(released->pinned[i]);
    released->state = PyEval_SaveThread();
}

static void take_back(Released *released) {
    if (!released->state) return;
    PyEval_RestoreThread(released->state);
    released->state = NULL;
    for (int i = 0; i < released->size; i++)
        if (released->pinned[i]) unpin(released->pinned[i]);
}

/* Check a call repeatedly until it can end, for at most `spin` seconds without progress. Return -1 with an
   exception. The loop reads the clock rarely, because most calls end early. */
int poll_for(Handle *call) {
    Calls *calls = call->calls;
    PeerLanes *pinned[calls->size];
    Released released = {NULL, pinned, calls->size};
    if (calls->shares_core) calls->shares_core = has_neighbour(calls);
    int found = 0, gives_way = calls->is_crowded || calls->shares_core;
    double now = gives_way || call->relay ? seconds() : 0.0, idle = now + calls->spin, limit = now + BUDGET;
    uint64_t moved = calls->moved;
    calls->deadline = limit;
    if (call->relay) release(calls, &released); /* moving chunks takes long, so release the GIL at once */
    for (int looks = 1; now < idle && now < limit; looks++) {
        if ((found = look_at(call))) break;
        if (calls->moved != moved) {
            moved = calls->moved;
            now = seconds();
            idle = now + calls->spin;
        }
        if (looks % OTHERS == 0 && calls->count > 1) {
            take_back(&released);
            if (!call->is_in_flight) return 0; /* another thread has handed the call over */
            if (calls->waiting || can_others_end(calls, call)) {
                int moved = look_at_all(calls);
                if (moved < 0) return -1;
                if (!call->is_in_flight) return 0;
                if (moved && now) idle = (now = seconds()) + calls->spin;
            }
        }
        if (gives_way) {
            release(calls, &released);
            double before = now;
            sched_yield();
            now = seconds();
            idle += now - before;
        } else {
            pause_core();
            if (looks % CLOCK == 0) {
                double before = now;
                now = seconds();
                if (!before) idle = now + calls->spin, limit = now + BUDGET;
            }
        }
        if (looks == LOOKS_BEFORE_CORE_CHECK) {
            calls->shares_core = has_neighbour(calls);
            gives_way = calls->is_crowded || calls->shares_core;
        }
        if (looks == LOOKS_WITH_INTERPRETER) release(calls, &released);
    }
    take_back(&released);
    if (!call->is_in_flight) return 0;
    if (!found && call->relay) {
        /* Check the relay again in the next loop iteration, because peers do not wake this rank for chunks that
           arrive later. */
        if (relay_poll_soon(call) < 0) return crash(calls);
        if (!call->is_in_flight) return 0;
    }
    if (found) return found > 0 ? complete(call) : hand_over(call);
    /* Let no other await poll in this loop iteration, because this polling had no result. */
    *(double *)calls->turn.buf = now;
    PyObject *done = PyObject_CallNoArgs(calls->stop_polling);
    DROP(done);
    return done ? 0 : -1;
}
