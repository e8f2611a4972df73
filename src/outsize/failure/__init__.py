"""Why memory ran out and what would mend it: text, exception, snapshot or dead process -> `Diagnosis`."""

from outsize.failure.explain import explain as explain
from outsize.failure.guard import guard as guard
from outsize.failure.guard import install as install
