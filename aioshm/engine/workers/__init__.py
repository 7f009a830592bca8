"""The workers of one engine, called together."""
