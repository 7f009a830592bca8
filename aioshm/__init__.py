"""aioshm: messages between the processes of one asyncio service."""
