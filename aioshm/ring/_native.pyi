from aioshm.ring.cores import bind_calls as bind_calls
from aioshm.ring.reference import EMPTY as EMPTY
from aioshm.ring.reference import SLOW_PATH as SLOW_PATH
from aioshm.ring.reference import ReaderBase as ReaderBase
from aioshm.ring.reference import WriterBase as WriterBase
from aioshm.ring.reference import memory_fence as memory_fence
