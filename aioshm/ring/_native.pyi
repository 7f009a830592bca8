from aioshm.ring._portable import ELSEWHERE as ELSEWHERE
from aioshm.ring._portable import NOTHING as NOTHING
from aioshm.ring._portable import Calls as Calls
from aioshm.ring._portable import ReaderCore as ReaderCore
from aioshm.ring._portable import WriterCore as WriterCore
from aioshm.ring._portable import memory_fence as memory_fence
from aioshm.ring._portable import timerfd_create as timerfd_create
from aioshm.ring._portable import timerfd_settime as timerfd_settime
