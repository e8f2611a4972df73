"""Models of allocators: what they take from the system for the blocks a program asks for.

In: allocation events (a trace of a real run, a traced step, a list of tensors). Out: requested, allocated, active and
reserved bytes at every event, their peaks, the segment map. `trace` reads torch's own recordings.
"""

from outsize.allocator.bfc import BfcSettings as BfcSettings
from outsize.allocator.bfc import most_lost as most_lost
from outsize.allocator.glibc import GlibcSettings as GlibcSettings
from outsize.allocator.replay import MODELS as MODELS
from outsize.allocator.replay import PhaseEvent as PhaseEvent
from outsize.allocator.replay import StepsReplay as StepsReplay
from outsize.allocator.replay import replay as replay
from outsize.allocator.replay import replay_steps as replay_steps
from outsize.allocator.settings import CudaSettings as CudaSettings
from outsize.allocator.settings import parse_settings as parse_settings
from outsize.allocator.settings import settings_from_environment as settings_from_environment
from outsize.allocator.take import TAKERS as TAKERS
from outsize.allocator.take import take as take
from outsize.allocator.trace import read_snapshot as read_snapshot
from outsize.allocator.trace import read_trace as read_trace
