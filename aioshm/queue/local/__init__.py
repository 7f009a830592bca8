"""The writer's host: readers attach over a Unix socket and read the ring in shared memory."""
