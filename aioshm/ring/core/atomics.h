/* Ordered access to memory that other processes write, each byte of which is read once. */

#ifndef AIOSHM_ATOMICS_H
#define AIOSHM_ATOMICS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb");  /* "yield" is a no-op on most of them */
#endif
}

static inline uint8_t load_acquire(const uint8_t *p)
{
    return atomic_load_explicit((const _Atomic uint8_t *)p, memory_order_acquire);
}

static inline void store_release(uint8_t *p, uint8_t value)
{
    atomic_store_explicit((_Atomic uint8_t *)p, value, memory_order_release);
}

static inline uint64_t load_word(const uint8_t *p)
{
    return atomic_load_explicit((const _Atomic uint64_t *)p, memory_order_relaxed);
}

/* Whether all of these bytes are zero (every == 0) or one (every == 1), looking at each of them once. */
static inline bool all_are(const uint8_t *p, size_t amount, uint8_t every)
{
    typedef const volatile uint64_t __attribute__((aligned(1), may_alias)) word;
    for (; amount >= 8; amount -= 8, p += 8)
        if (*(word *)p != every * UINT64_C(0x0101010101010101))
            return false;
    for (; amount > 0; amount--, p++)
        if (atomic_load_explicit((const _Atomic uint8_t *)p, memory_order_relaxed) != every)
            return false;
    return true;
}

static inline void store_count(uint8_t *line, uint64_t value)
{
    atomic_store_explicit((_Atomic uint64_t *)line, value, memory_order_release);
}

/* Add to a word that this end alone writes, and others only look at. */
static inline void add_to_word(uint8_t *p, uint64_t value)
{
    atomic_store_explicit((_Atomic uint64_t *)p, load_word(p) + value, memory_order_relaxed);
}

static inline void full_fence(void)
{
    atomic_thread_fence(memory_order_seq_cst);
}

static inline uint64_t now_ns(void)
{
    struct timespec t;
#if defined(__APPLE__)
    clock_gettime(CLOCK_UPTIME_RAW, &t);  /* what time.monotonic() is there */
#else
    clock_gettime(CLOCK_MONOTONIC, &t);
#endif
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

#endif
