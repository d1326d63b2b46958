/* Posting of contributions: lookup of peers, the search for free slots, and the posts. */
#include "accelerator.h"

uint32_t slot_of(const Calls *calls, uint64_t identity, uint32_t first, uint32_t slots) {
    return first + (uint32_t)((identity + calls->shift) % slots);
}

/* Return the group's dispatcher, as a borrowed reference; the caller holds a reference to the group. `Calls` has
   only a weak reference, because the engine keeps `Calls` until the group ends: a strong reference would keep a group
   alive that the program has dropped. */
PyObject *owner_of(const Calls *calls) { return PyWeakref_GetObject(calls->owner); }
int is_true(PyObject *object, PyObject *name) {
    PyObject *value = PyObject_GetAttr(object, name);
    int found = value == Py_True ? 1 : value == Py_False ? 0 : value ? PyObject_IsTrue(value) : -1;
    DROP(value);
    return found;
}

/* ---- peers */

/* Return the lanes of peer `rank`; NULL without an exception if no link shares memory with this peer. */
PeerLanes *peer_of(Calls *calls, int rank) {
    PeerLanes *peer = calls->peers[rank];
    if (peer && peer->can_post) return peer;
    PyObject *found = PyObject_CallFunction(calls->resolve, "i", rank);
    if (!found) return NULL;
    calls->epoch++;
    calls->asked++;
    if (TYPE_OF(found) != PeerLanes_type || !((PeerLanes *)found)->can_post) {
        DROP(found);
        SET_REFERENCE(calls->peers[rank], NULL);
        return NULL;
    }
    SET_REFERENCE(calls->peers[rank], found);
    return calls->peers[rank];
}

/* Create the tuple of the readers' lane writers (Python objects), which the common lane stores with each post. */
static int lanes_of(Calls *calls, Contribution *each) {
    if (each->lanes && each->epoch == calls->epoch) return 0;
    calls->asked++; /* the allocation may start a garbage collection, which may run Python code */
    PyObject *lanes = PyTuple_New(each->readers_count);
    for (int i = 0; lanes && i < each->readers_count; i++) {
        PeerLanes *peer = calls->peers[each->readers[i]];
        PyObject *writer = peer && peer->writer ? peer->writer : Py_None;
        KEEP(writer);
        PyTuple_SetItem(lanes, i, writer);
    }
    if (!lanes) return -1;
    SET_REFERENCE(each->lanes, lanes);
    each->epoch = calls->epoch;
    return 0;
}

/* Allocate the memory of a slot for a contribution. Return 0 if the contribution is larger than the slot, or the
   host has no memory left. */
static int reserved(Calls *calls, PeerLanes *peer, uint32_t slot, const Contribution *each) {
    const Slots *slots = each->is_common ? &peer->common->slots : &peer->slots;
    if (each->nbytes > INLINE_NBYTES && each->nbytes > slot_nbytes(slots, slot)) return 0;
    if (each->is_common ? common_has(peer->common, slot, each->nbytes) : lane_has(peer, slot, each->nbytes)) return 1;
    calls->asked++;
    return each->is_common ? common_reserve(peer->common, slot, each->nbytes) : lane_reserve(peer, slot, each->nbytes);
}

/* Return IN_USE for a slot that holds a post of this group, and CANNOT for a post of another group: a call must not
   wait for the readers of another group. */
static int in_use(const Calls *calls, const Slots *slots, uint32_t slot) {
    return group_of_slot(slots, slot) == calls->group ? IN_USE : CANNOT;
}

/* Return CAN, CANNOT or IN_USE for posting a contribution; -1 with an exception. If `asked` has changed, earlier
   results for other contributions are no longer valid. */
static int is_postable(Calls *calls, Contribution *each, uint64_t identity) {
    uint32_t slot = slot_of(calls, identity, each->first_slot, each->slots);
    for (int i = 0; i < each->readers_count; i++) {
        PeerLanes *peer = peer_of(calls, each->readers[i]);
        if (!peer) return PyErr_Occurred() ? -1 : CANNOT;
        if (each->is_common) continue;
        return lane_is_free(peer, slot) ? reserved(calls, peer, slot, each) : in_use(calls, &peer->slots, slot);
    }
    PeerLanes *peer = calls->peers[each->readers[0]];
    if (!peer || !peer->common) return CANNOT;
    int is_free = common_is_free(peer->common, slot);
    if (!is_free) return in_use(calls, &peer->common->slots, slot);
    return is_free < 0 || lanes_of(calls, each) < 0 ? -1 : reserved(calls, peer, slot, each);
}

int are_postable(Calls *calls, Contribution *contributions, int count, uint64_t identity) {
    int postable = CAN;
    for (int i = 0; i < count && postable == CAN; i++) postable = is_postable(calls, contributions + i, identity);
    return postable;
}

/* Wake all sleeping ranks that read these contributions. */
int ring(Calls *calls, const Contribution *contributions, int count) {
    PeerLanes *first = calls->peers[contributions[0].readers[0]];
    note_core(first);
    if (poll_soon(first) < 0) return -1;
    fence_full();
    for (int i = 0; i < count; i++)
        for (int n = 0; n < contributions[i].readers_count; n++) {
            PeerLanes *peer = calls->peers[contributions[i].readers[n]];
            if (peer && peer->can_post) wake(peer);
        }
    return 0;
}

/* Post contributions. No Python function may have run since `are_postable` returned CAN. */
int post_all(Handle *call, Contribution *contributions, int count) {
    if (!count) return 0;
    Calls *calls = call->calls;
    for (int i = 0; i < count; i++) {
        Contribution *each = contributions + i;
        Post post = {slot_of(calls, call->identity, each->first_slot, each->slots),
                     {call->identity, calls->group, call->steps->fingerprint, (uint64_t)each->nbytes},
                     each->nbytes ? buffer_bytes(call, each->buffer) : NULL};
        if (!each->is_common) {
            lane_post(calls->peers[each->readers[0]], &post);
            continue;
        }
        PeerLanes *peers[each->readers_count];
        for (int n = 0; n < each->readers_count; n++) peers[n] = calls->peers[each->readers[n]];
        if (common_post(&post, peers, each->readers_count, each->lanes) < 0) return -1;
    }
    return ring(calls, contributions, count);
}
