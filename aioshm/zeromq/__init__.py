"""ZeroMQ for an event loop: contexts, sockets, keys, callbacks, monitors, and guards against strangers."""
