"""``aioshm ls``, ``inspect``, ``top``, ``who`` and ``dump``: live queues, looked at from outside."""
