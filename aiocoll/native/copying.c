/* Copies of arrays: at the speed of vector instructions, or with stores that bypass the caches. */
#include "accelerator.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { FAR = 64 };     /* number of copies that bypass the caches after a slow copy, before the next measurement */
enum { LEAST = 1024 }; /* smallest copy in bytes whose duration is measured, or that may use vector instructions */
enum { PAGE = 4096 };  /* bytes of a page */
#define MOMENT 0.3e-6  /* seconds for reading the clock and starting a copy */
#define NEAR 0.2e-9    /* maximum seconds per byte of a copy for a reader that shares a cache with this core */

/* Copy as memmove does, with vector instructions where memmove is slow. For large copies, memmove uses the instruction
   `rep movsb`. On AMD's Zen cores, this instruction takes up to twenty times as long if the target is 1 to 31 bytes
   after the source, modulo the size of a page. Source: bug 30994 of glibc. */
void copy_bytes(char *target, const char *source, npy_intp nbytes) {
#ifdef __SSE2__
    uintptr_t distance = (uintptr_t)target - (uintptr_t)source;
    if (nbytes >= LEAST && distance >= (uintptr_t)nbytes && (distance - 1) % PAGE < 31)
        for (; nbytes >= 64; target += 64, source += 64, nbytes -= 64) {
            __m128i words[4];
            memcpy(words, source, 64);
            for (int i = 0; i < 4; i++) _mm_storeu_si128((__m128i *)target + i, words[i]);
        }
#endif
    memmove(target, source, nbytes);
}

/* Copy with stores that bypass the caches. An ordinary store first loads the cache line, from memory or from another
   core. This takes longest if the cores share no cache. */
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
        _mm_sfence(); /* a fence, because streaming stores are not ordered with other stores */
    }
#endif
    memcpy(target, source, nbytes);
}

/* Copy to memory that another core has read. Bypass the caches if a measurement has shown that this core is distant.
   `far` is the number of further copies that bypass the caches. */
void copy_to_reader(int *far, char *target, const char *source, npy_intp nbytes) {
    if (nbytes < LEAST) {
        memcpy(target, source, nbytes);
    } else if (*far) {
        --*far;
        copy_past_caches(target, source, nbytes);
    } else {
        double start = seconds();
        copy_bytes(target, source, nbytes);
        if (seconds() - start > MOMENT + nbytes * NEAR) *far = FAR;
    }
}
