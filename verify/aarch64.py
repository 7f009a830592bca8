"""The core's own atomics, compiled for AArch64, under qemu: ``python -m verify.aarch64``.

The program includes their header, ``ring/core/atomics.h``, so they are what runs, as compiled for that processor. This
shows: they compile, and the protocol holds with them while two threads run it. What it does not show: that hardware
could not reorder them, for qemu runs them on this machine's processor, which on x86 reorders far less than Arm may.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CORE = Path(__file__).parent.parent / "aioshm" / "ring" / "core"
NEEDED = ("aarch64-linux-gnu-gcc", "qemu-aarch64")

HARNESS = r"""
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include "atomics.h"
static _Alignas(64) uint8_t flags[64], parked_r[64], parked_w[64], turn[64];
static _Alignas(64) uint8_t body[64];
static uint8_t saw_r, saw_w;
enum { LAPS = 20000 };
static void meet(int who) { /* both threads begin a lap together */
    store_release(turn + who, (uint8_t)(turn[who] + 1));
    while (load_acquire(turn + !who) == (uint8_t)(turn[who] - 1)) { }
}
static int bad_copy, lost;
static void *writer(void *unused) {
    for (uint32_t lap = 1; lap <= LAPS; lap++) {
        while (load_acquire(flags) && !all_are(flags + 1, 1, 1)) { }
        atomic_thread_fence(memory_order_acquire);
        store_release(flags, 0);
        atomic_thread_fence(memory_order_release);
        memset(body, (int)(lap & 0xff), sizeof body);
        atomic_thread_fence(memory_order_release);
        flags[1] = 0;
        store_release(flags, 1);
    }
    for (int lap = 0; lap < LAPS; lap++) {
        meet(0);
        store_release(flags + 8, 1);
        full_fence();
        saw_w = load_acquire(parked_r);
        meet(0);
        store_release(flags + 8, 0);
        meet(0);
    }
    return unused;
}
static void *reader(void *unused) {
    for (uint32_t lap = 1; lap <= LAPS; lap++) {
        uint8_t copy[64];
        while (load_acquire(flags + 1) || !load_acquire(flags)) { }
        memcpy(copy, body, sizeof copy);
        for (size_t n = 0; n < sizeof copy; n++)
            bad_copy += copy[n] != (lap & 0xff);
        store_release(flags + 1, 1);
    }
    for (int lap = 0; lap < LAPS; lap++) {
        meet(1);
        store_release(parked_r, 1);
        full_fence();
        saw_r = load_acquire(flags + 8);
        meet(1);
        lost += !saw_r && !saw_w;
        store_release(parked_r, 0);
        meet(1);
    }
    return unused;
}
int main(void) {
    pthread_t a, b;
    flags[1] = 1;
    pthread_create(&a, NULL, writer, NULL);
    pthread_create(&b, NULL, reader, NULL);
    pthread_join(a, NULL);
    pthread_join(b, NULL);
    printf("%d laps: %d torn or wrong bytes, %d lost wake-ups\n", LAPS, bad_copy, lost);
    return bad_copy || lost;
}
"""


def main() -> int:
    """Compile and run the harness; return the exit status."""
    lacking = [tool for tool in NEEDED if shutil.which(tool) is None]
    if lacking:
        print(f"left out: there is no {' and no '.join(lacking)} (apt-get install qemu-user gcc-aarch64-linux-gnu)")
        return 0
    with tempfile.TemporaryDirectory(prefix="aioshm-litmus-") as folder:
        source, program = Path(folder, "harness.c"), Path(folder, "harness")
        source.write_text(HARNESS)
        flags = ["-std=gnu11", "-O2", "-static", "-pthread", f"-I{CORE}"]
        subprocess.run([NEEDED[0], *flags, "-o", program, source], check=True)
        done = subprocess.run([NEEDED[1], program], capture_output=True, text=True, timeout=120, check=False)
    print(f"AArch64 under qemu: {done.stdout.strip() or done.stderr.strip()}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
