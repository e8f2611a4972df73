"""Why memory ran out and what would mend it: text, exception, snapshot or dead process -> `Diagnosis`."""

from outsize.failure.explain import explain
from outsize.failure.guard import explain_uncaught, guard

__all__ = ["explain", "explain_uncaught", "guard"]
