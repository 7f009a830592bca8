"""Batches of KV-cache events, their bytes, numbers and gaps. No I/O."""
