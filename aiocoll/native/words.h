/* Atomic words in shared memory: loads, stores, fences. Also the clock. */
#ifndef AIOCOLL_WORDS_H
#define AIOCOLL_WORDS_H

#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

/* Other processes map the same words, so each load or store must be one instruction, without a lock. */
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "8-byte words must be lock free");
_Static_assert(sizeof(_Atomic uint64_t) == 8, "a word has 8 bytes");

typedef _Atomic uint64_t Word;

static inline uint64_t load(const Word *word) { return atomic_load_explicit((Word *)word, memory_order_relaxed); }
static inline uint64_t load_acquire(const Word *word) {
    return atomic_load_explicit((Word *)word, memory_order_acquire);
}
static inline void store(Word *word, uint64_t value) { atomic_store_explicit(word, value, memory_order_relaxed); }
static inline void store_release(Word *word, uint64_t value) {
    atomic_store_explicit(word, value, memory_order_release);
}
static inline void fence_release(void) { atomic_thread_fence(memory_order_release); }
static inline void fence_acquire(void) { atomic_thread_fence(memory_order_acquire); }
static inline void fence_full(void) { atomic_thread_fence(memory_order_seq_cst); }

/* Let the other hyper-thread of this core run between two polls. */
static inline void pause_core(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

/* Return the time in seconds, on the same clock as Python's time.monotonic and time.perf_counter. */
static inline double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

#endif
