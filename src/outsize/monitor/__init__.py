"""What a process tree holds, read from outside through `/proc`: nothing runs in the watched processes."""

from outsize.monitor.processes.tree import ProcessReading as ProcessReading
from outsize.monitor.processes.tree import TreeReading as TreeReading
from outsize.monitor.processes.tree import read_kills as read_kills
from outsize.monitor.processes.tree import read_tree as read_tree
