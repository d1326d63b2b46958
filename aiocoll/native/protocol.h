/* Shared-memory protocol of outboxes: the order in which writers and readers store and load words.

   docs/native.md gives the reason for each fence. This file does not use Python, so that tests/native/race.c can run
   the same code in two threads. aiocoll/native/layout.py defines the meaning of the words. The Python implementations
   are aiocoll/transport/shm/slots.py and doorbell.py. */
#ifndef AIOCOLL_PROTOCOL_H
#define AIOCOLL_PROTOCOL_H

#include "layout.h"
#include "words.h"

/* Indices of the words in the line of 64 bytes that describes a slot. */
enum { LINE_IDENTITY, LINE_GROUP, LINE_LENGTH, LINE_FINGERPRINT, LINE_BYTES, LINE_WORDS = 8 };
_Static_assert(LINE_WORDS * sizeof(Word) == LAYOUT_LINE, "a slot has a cache line");

typedef struct {
    uint64_t identity, group, fingerprint, length;
} Head;

enum { MISSING, PRESENT, DIFFERENT };

/* ---- the writer */

/* Return whether the reader has consumed post number `number`, the last one, so that the slot may be overwritten. */
static inline int is_consumed(const Word *consumed, uint64_t number) { return load_acquire(consumed) == number; }

/* Write the line of a slot. The caller must write the data of the post after this call. */
static inline void fill_line(Word *line, const Head *head) {
    /* Store the group id first. A slow reader, for which the writer no longer waits, then detects that the post has
       changed. */
    store(line + LINE_GROUP, head->group);
    fence_release();
    store(line + LINE_IDENTITY, head->identity);
    store(line + LINE_LENGTH, head->length);
    store(line + LINE_FINGERPRINT, head->fingerprint);
}

/* Publish a filled slot to one reader. */
static inline void publish(Word *named, uint64_t number, Word *posts) {
    store_release(named, number);
    store_release(posts, load(posts) + 1);
}

/* ---- the reader */

static inline int look_for(const Word *named, const Word *consumed, const Word *line, const Head *expected,
                           int compares_length) {
    if (load_acquire(named) <= load(consumed)) return MISSING;
    if (load(line + LINE_IDENTITY) != expected->identity || load(line + LINE_GROUP) != expected->group) return MISSING;
    if (load(line + LINE_FINGERPRINT) != expected->fingerprint) return DIFFERENT;
    return compares_length && load(line + LINE_LENGTH) != expected->length ? DIFFERENT : PRESENT;
}

/* Mark a post as consumed. Return 0 if the writer, which no longer waits for this rank, has overwritten the post
   during the reading. */
static inline int consume(const Word *named, Word *consumed, const Word *line, uint64_t group) {
    /* Load the number before the group id, so that it cannot be the number of a later post than the one that was
       read. */
    uint64_t number = load_acquire(named);
    fence_acquire();
    if (load(line + LINE_GROUP) != group) return 0;
    store_release(consumed, number);
    return 1;
}

/* ---- chunk queues; the Python implementation is aiocoll/transport/shm/chunk_queue.py */

/* Indices of the words in the line of 64 bytes that describes a chunk. */
enum { CHUNK_NUMBER, CHUNK_GROUP, CHUNK_IDENTITY, CHUNK_SEGMENT, CHUNK_OFFSET, CHUNK_FINGERPRINT, CHUNK_LENGTH };

typedef struct {
    uint64_t identity, group, fingerprint, length; /* length: bytes of the whole message to which the chunk belongs */
} Chunk;

/* Return whether the reader has consumed `number` chunks. If not, request that the reader wakes this rank. */
static inline int are_taken(const Word *taken, Word *waiting, uint64_t number) {
    if (load_acquire(taken) >= number) return 1;
    store(waiting, 1);
    fence_full();
    return load_acquire(taken) >= number;
}

/* Publish a chunk, whose data is in the queue, to the reader. Chunks are numbered from 1. */
static inline void put_chunk(Word *line, const Chunk *chunk, uint64_t number) {
    store(line + CHUNK_GROUP, chunk->group);
    store(line + CHUNK_IDENTITY, chunk->identity);
    store(line + CHUNK_SEGMENT, 0);
    store(line + CHUNK_FINGERPRINT, chunk->fingerprint);
    store(line + CHUNK_LENGTH, chunk->length);
    store_release(line + CHUNK_NUMBER, number);
}

static inline int has_chunk(const Word *line, uint64_t number) { return load_acquire(line + CHUNK_NUMBER) == number; }

/* Mark a chunk as consumed. Return whether the writer has requested to be woken. */
static inline int take_chunk(Word *taken, Word *waiting, uint64_t number) {
    store_release(taken, number);
    fence_full();
    if (!load(waiting)) return 0;
    store(waiting, 0);
    return 1;
}

/* Count one more operation that has written its last chunk, for the reader. */
static inline void finish_chunks(Word *chunked) { store_release(chunked, load(chunked) + 1); }

/* ---- the doorbell */

/* Return the status of a peer that sleeps and has not been woken yet; otherwise 0. The caller must have issued a
   full fence after the post. The peer issues a full fence between storing its status and its last check before it
   sleeps. */
static inline uint64_t sleeping(const Word *status, uint64_t rung) {
    uint64_t found = load(status);
    return found & 1 && found != rung ? found : 0;
}

#endif
