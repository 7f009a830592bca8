from aioshm.ring.reference import ELSEWHERE as ELSEWHERE
from aioshm.ring.reference import NOTHING as NOTHING
from aioshm.ring.reference import Calls as Calls
from aioshm.ring.reference import ReaderBase as ReaderBase
from aioshm.ring.reference import WriterBase as WriterBase
from aioshm.ring.reference import memory_fence as memory_fence
