"""Queues between the processes of a process group."""
