"""The methods of vLLM 0.33's ``MessageQueue``, with their parameters."""

SIGNATURES = {
    "__init__": "(self, n_reader, n_local_reader, local_reader_ranks=None, max_chunk_bytes=25165824, max_chunks=10, "
    "connect_ip=None, enable_shm_tensor_arena=False)",
    "acquire_read": "(self, timeout=None, indefinite=False)",
    "acquire_write": "(self, timeout=None)",
    "broadcast_object": "(self, obj=None)",
    "create_from_handle": "(handle, rank)",
    "create_from_process_group": "(pg, max_chunk_bytes, max_chunks, writer_rank=0, external_writer_handle=None, "
    "blocking=True)",
    "create_from_process_group_single_reader": "(pg, max_chunk_bytes, max_chunks, reader_rank=0, blocking=False)",
    "dequeue": "(self, timeout=None, indefinite=False)",
    "enqueue": "(self, obj, timeout=None)",
    "export_handle": "(self)",
    "shutdown": "(self)",
    "wait_until_ready": "(self)",
}
