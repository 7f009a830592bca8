"""Subscribers to KV-cache events."""
