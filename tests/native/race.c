/* A race test of outboxes and chunk queues: two threads with a shared mapping run their protocols.

   race ROUNDS [SEED]: in each round, both threads post, fold and free, and sleep while nothing arrives. Then one thread
   makes ROUNDS posts and withdraws half of them while the other reads them. Then one thread puts ROUNDS chunks into a
   queue and the other takes them. The data of the first and the last part is not atomic, so that ThreadSanitizer finds
   a missing release or acquire. Checks find missing fences and lost wake-ups. */
#define _GNU_SOURCE
#include "protocol.h"

#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SLOTS = 4, WORDS = 16, LOOKS = 512, PATIENCE = 10000 /* milliseconds */ };

/* Memory that one rank writes and its peer only reads. */
typedef struct {
    _Alignas(LAYOUT_LINE) Word status[LINE_WORDS];
    _Alignas(LAYOUT_LINE) Word lane[LAYOUT_LANE_WORDS];
    _Alignas(LAYOUT_LINE) Word lines[SLOTS][LINE_WORDS];
    _Alignas(LAYOUT_LINE) uint64_t bytes[SLOTS][WORDS];
    /* the chunk queue from this rank, whose peer writes the first two */
    _Alignas(LAYOUT_LINE) Word taken[LINE_WORDS];
    _Alignas(LAYOUT_LINE) Word waiting[LINE_WORDS];
    _Alignas(LAYOUT_LINE) Word chunk_lines[LAYOUT_CHUNKS][LINE_WORDS];
    _Alignas(LAYOUT_LINE) uint64_t chunks[LAYOUT_CHUNKS][WORDS];
} Outbox;

typedef struct {
    Outbox *own, *peer;
    int eventfd, peer_eventfd;
    uint64_t rank, numbers[SLOTS], rung, status, sleeps, kept;
    unsigned seed;
} Rank;

static uint64_t rounds;

static void fail(const char *what, uint64_t round) {
    fprintf(stderr, "round %llu: %s\n", (unsigned long long)round, what);
    exit(1);
}

static uint64_t value(uint64_t rank, uint64_t identity, int word) {
    return identity * 2654435761u + rank * 977 + (uint64_t)word;
}

/* Return the head of a call that is unique to its group, so that a half overwritten line matches no call. */
static Head head_of(uint64_t identity, uint64_t group) {
    return (Head){identity, group, identity * 31 + group, WORDS * 8};
}

/* ---- the doorbell, as Doorbell and PeerDoorbell in aiocoll/transport/shm/doorbell.py */

static void set_status(Rank *self) { store(self->own->status, ++self->status); }

static void ring(Rank *self) {
    fence_full();
    uint64_t status = sleeping(self->peer->status, self->rung), one = 1;
    if (!status) return;
    self->rung = status;
    if (write(self->peer_eventfd, &one, sizeof one) < 0) fail("the eventfd is full", status);
}

static int has_post(const Rank *self, uint64_t round) {
    int slot = (int)(round % SLOTS);
    Head expected = head_of(round, 1);
    return look_for(self->peer->lane + LAYOUT_LANE_NAMED + slot, self->own->lane + LAYOUT_LANE_CONSUMED + slot,
                    self->peer->lines[slot], &expected, 1) != MISSING;
}

/* Sleep until the peer rings, unless `is_there` returns 1. */
static void rest(Rank *self, int (*is_there)(const Rank *, uint64_t), uint64_t round) {
    set_status(self);
    fence_full();
    if (!is_there(self, round)) {
        struct pollfd waits = {self->eventfd, POLLIN, 0};
        self->sleeps++;
        if (poll(&waits, 1, PATIENCE) == 0) fail("a wake-up was lost", round);
    }
    uint64_t times;
    if (read(self->eventfd, &times, sizeof times) < 0) times = 0; /* the doorbell was not rung */
    set_status(self);
}

/* ---- both threads post, fold and free */

static void *exchange(void *argument) {
    Rank *self = argument;
    for (uint64_t round = 1; round <= rounds; round++) {
        int slot = (int)(round % SLOTS);
        Head head = head_of(round, 1);
        if (!is_consumed(self->peer->lane + LAYOUT_LANE_CONSUMED + slot, self->numbers[slot]))
            fail("the slot is not free", round);
        fill_line(self->own->lines[slot], &head);
        for (int i = 0; i < WORDS; i++) self->own->bytes[slot][i] = value(self->rank, round, i);
        publish(self->own->lane + LAYOUT_LANE_NAMED + slot, ++self->numbers[slot], self->own->lane + LAYOUT_POSTS);
        ring(self);
        const Word *named = self->peer->lane + LAYOUT_LANE_NAMED + slot;
        Word *consumed = self->own->lane + LAYOUT_LANE_CONSUMED + slot;
        int looks = (int)(rand_r(&self->seed) % 64 ? rand_r(&self->seed) % LOOKS : 0), found;
        while ((found = look_for(named, consumed, self->peer->lines[slot], &head, 1)) == MISSING) {
            if (looks-- <= 0) rest(self, has_post, round), looks = LOOKS;
            else pause_core();
        }
        if (found == DIFFERENT) fail("the line has another call", round);
        uint64_t sum = 0, expected = 0;
        for (int i = 0; i < WORDS; i++) sum += self->peer->bytes[slot][i], expected += value(1 - self->rank, round, i);
        if (sum != expected) fail("the fold is wrong", round);
        if (!consume(named, consumed, self->peer->lines[slot], 1)) fail("the post was overwritten", round);
    }
    return NULL;
}

/* ---- one thread posts and withdraws, the other reads: atomic data, since writes and reads overlap */

static _Atomic int is_over;

static void *post_and_give_up(void *argument) {
    Rank *self = argument;
    uint64_t group = 2;
    for (uint64_t identity = 1; identity <= rounds; identity++) {
        Head head = head_of(identity, group);
        Word *named = self->own->lane + LAYOUT_LANE_NAMED, *bytes = (Word *)self->own->bytes[0];
        fill_line(self->own->lines[0], &head);
        for (int i = 0; i < WORDS; i++) store(bytes + i, value(group, identity, i));
        publish(named, ++self->numbers[0], self->own->lane + LAYOUT_POSTS);
        int given_up = rand_r(&self->seed) % 2, looks = rand_r(&self->seed) % 128;
        while (!is_consumed(self->peer->lane + LAYOUT_LANE_CONSUMED, self->numbers[0])) {
            if (given_up && looks-- <= 0) break;
            pause_core();
        }
        if (!given_up || looks > 0) {
            self->kept++; /* the reader has confirmed this post */
        } else {          /* as CommonWriter._withdraw does before it fills the slot for another group */
            store_release(named, 0);
            group++;
        }
    }
    is_over = 1;
    return NULL;
}

static void *read_what_is_there(void *argument) {
    Rank *self = argument;
    const Word *named = self->peer->lane + LAYOUT_LANE_NAMED, *line = self->peer->lines[0],
               *bytes = (Word *)self->peer->bytes[0];
    Word *consumed = self->own->lane + LAYOUT_LANE_CONSUMED;
    uint64_t last = 0;
    while (!is_over) {
        if (load_acquire(named) <= load(consumed)) {
            pause_core();
            continue;
        }
        uint64_t identity = load(line + LINE_IDENTITY), group = load(line + LINE_GROUP), copy[WORDS];
        Head real = head_of(identity, group);
        if (look_for(named, consumed, line, &real, 1) != PRESENT) continue; /* the line is being overwritten */
        for (int i = 0; i < WORDS; i++) copy[i] = load(bytes + i);
        if (!consume(named, consumed, line, group)) continue;
        for (int i = 0; i < WORDS; i++)
            if (copy[i] != value(group, identity, i)) fail("what was overwritten counts as read", identity);
        if (identity <= last) fail("a post was read twice", identity);
        last = identity;
        self->kept++;
    }
    return NULL;
}

/* ---- one thread puts chunks into a queue, the other takes them */

static int has_room(const Rank *self, uint64_t number) {
    return number <= LAYOUT_CHUNKS || are_taken(self->own->taken, self->own->waiting, number - LAYOUT_CHUNKS);
}
static int is_put(const Rank *self, uint64_t number) {
    return has_chunk(self->peer->chunk_lines[number % LAYOUT_CHUNKS], number);
}
static void wait_for(Rank *self, int (*is_there)(const Rank *, uint64_t), uint64_t number) {
    int looks = (int)(rand_r(&self->seed) % 64 ? rand_r(&self->seed) % LOOKS : 0);
    while (!is_there(self, number)) {
        if (looks-- <= 0) rest(self, is_there, number), looks = LOOKS;
        else pause_core();
    }
}

static void *put_chunks(void *argument) {
    Rank *self = argument;
    for (uint64_t number = 1; number <= rounds; number++) {
        wait_for(self, has_room, number);
        for (int i = 0; i < WORDS; i++) self->own->chunks[number % LAYOUT_CHUNKS][i] = value(0, number, i);
        Chunk chunk = {number, 1, number * 31, WORDS * 8};
        put_chunk(self->own->chunk_lines[number % LAYOUT_CHUNKS], &chunk, number);
        ring(self);
    }
    return NULL;
}

static void *take_chunks(void *argument) {
    Rank *self = argument;
    for (uint64_t number = 1; number <= rounds; number++) {
        wait_for(self, is_put, number);
        const Word *line = self->peer->chunk_lines[number % LAYOUT_CHUNKS];
        if (load(line + CHUNK_IDENTITY) != number || load(line + CHUNK_FINGERPRINT) != number * 31)
            fail("the line is that of another chunk", number);
        for (int i = 0; i < WORDS; i++)
            if (self->peer->chunks[number % LAYOUT_CHUNKS][i] != value(0, number, i)) fail("a chunk is wrong", number);
        if (take_chunk(self->peer->taken, self->peer->waiting, number)) ring(self);
    }
    return NULL;
}

static void run(Rank *ranks, void *(*first)(void *), void *(*second)(void *)) {
    pthread_t threads[2];
    if (pthread_create(threads, NULL, first, ranks) || pthread_create(threads + 1, NULL, second, ranks + 1))
        fail("no threads", 0);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
}

static void open_pair(Rank *ranks, unsigned seed) {
    Outbox *boxes = mmap(NULL, 2 * sizeof *boxes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (boxes == MAP_FAILED) fail("no memory", 0);
    int eventfds[2] = {eventfd(0, EFD_NONBLOCK), eventfd(0, EFD_NONBLOCK)};
    for (int i = 0; i < 2; i++)
        ranks[i] = (Rank){boxes + i,       boxes + 1 - i,       eventfds[i],
                          eventfds[1 - i], .rank = (uint64_t)i, .seed = seed + (unsigned)i};
}

int main(int count, char **arguments) {
    if (count < 2) return fprintf(stderr, "usage: race ROUNDS [SEED]\n"), 2;
    rounds = strtoull(arguments[1], NULL, 10);
    Rank ranks[2];
    unsigned seed = count > 2 ? (unsigned)atoi(arguments[2]) : 1;
    open_pair(ranks, seed);
    run(ranks, exchange, exchange);
    uint64_t sleeps = ranks[0].sleeps + ranks[1].sleeps;
    open_pair(ranks, seed);
    run(ranks, post_and_give_up, read_what_is_there);
    /* A post may be read after its withdrawal, so the reader may have more posts. */
    if (ranks[1].kept + 1 < ranks[0].kept) fail("a post counts as read that was not", ranks[0].kept - ranks[1].kept);
    Rank ends[2];
    open_pair(ends, seed);
    run(ends, put_chunks, take_chunks);
    printf("%llu rounds, %llu sleeps; %llu of as many posts were not given up, %llu were read\n",
           (unsigned long long)rounds, (unsigned long long)sleeps, (unsigned long long)ranks[0].kept,
           (unsigned long long)ranks[1].kept);
    return 0;
}
