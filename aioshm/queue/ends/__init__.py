"""The two ends of a queue, put together out of parts: a gate, and audiences to write to or a source to read from."""
