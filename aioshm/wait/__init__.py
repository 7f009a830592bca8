"""How an event loop waits for a byte in shared memory to change."""
