/* Written by python -m tools.layout_header: the constants of the Python code, which explains each. */

#ifndef AIOSHM_LAYOUT_H
#define AIOSHM_LAYOUT_H

#define WRITER_LINE 64
#define WRITER_PARKED 128
#define READERS_PARKED 192
#define SLOT_HEADER_BYTES 64
#define CHUNK 32
#define SIZE 40
#define OVERFLOW_SIZE 52
#define CHUNK_HEADER_BYTES 64
#define SPINNING 9
#define BYTES 40
#define OVERFLOWS 48
#define LATENCY_NS 24
#define LATENCY_BUCKETS 32
#define LATENCY_FIRST_BIT 8
#define LATENCY_EVERY 8
#define TRACE_BYTES 26
#define TRAIL 1024
#define OVERFLOW 2
#define CHUNK_LISTS 24
#define UNREAD 48
#define TRACES 16
#define TAKE_MAX 4194304
#define COPY_MAX 65536
#define BATCH_LOOKS 8
#define RUSH_NS 20000
#define HELD_SPIN_NS 50000

#endif
