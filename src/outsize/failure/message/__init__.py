"""Messages of programs that ran out of memory -> `Failure`."""

from outsize.failure.message.read import read as read
