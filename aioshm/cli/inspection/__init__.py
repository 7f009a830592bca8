"""``aioshm ls``, ``inspect``, ``top``, ``who`` and ``dump``: live queues, from outside."""
