"""The two ends of a queue, put together out of parts: a gate, and readers to write to or a source to read from."""
