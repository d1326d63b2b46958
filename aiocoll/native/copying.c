/* Copies of many bytes, by the caches or past them. */
#include "accelerator.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { FAR = 64 };     /* copies past the caches to a core that is far away, until that is measured again */
enum { LEAST = 1024 }; /* bytes of a copy that is measured */
#define MOMENT 0.3e-6  /* seconds that it takes to look at the clock, and to begin */
#define NEAR 0.2e-9    /* seconds that a byte takes at most to a core that shares a cache with this one */

/* A core that overwrites a line reads it first: from memory, or from another core that has it, which takes longest if
   they share no cache. Not so with stores that pass the caches by. */
void copy_past_caches(char *target, const char *source, npy_intp nbytes) {
#ifdef __SSE2__
    npy_intp head = -(uintptr_t)target & 15;
    if (nbytes >= head + 64) {
        memcpy(target, source, head);
        target += head, source += head, nbytes -= head;
        for (; nbytes >= 64; target += 64, source += 64, nbytes -= 64) {
            __m128i words[4];
            memcpy(words, source, 64);
            for (int i = 0; i < 4; i++) _mm_stream_si128((__m128i *)target + i, words[i]);
        }
        _mm_sfence(); /* they are not in order with other stores */
    }
#endif
    memcpy(target, source, nbytes);
}

/* Copy to memory that another core has read; past the caches, if that core is far away. `far`: how many of the next
   copies go so. */
void copy_to_reader(int *far, char *target, const char *source, npy_intp nbytes) {
    if (nbytes < LEAST) {
        memcpy(target, source, nbytes);
    } else if (*far) {
        --*far;
        copy_past_caches(target, source, nbytes);
    } else {
        double start = seconds();
        memcpy(target, source, nbytes);
        if (seconds() - start > MOMENT + nbytes * NEAR) *far = FAR;
    }
}
