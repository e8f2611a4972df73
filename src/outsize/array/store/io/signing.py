"""Signed web addresses of many objects, made from one that the library of an object store has signed.

In: a signed address (signature version 4 in its query) and the secret that it was signed with. Out: a function that signs the
addresses of other objects of the same bucket. The library takes several times longer for each than the request itself. It
stays the judge: what it has signed is signed again here, and where the two differ, nothing is signed here at all.
"""

from __future__ import annotations

import hashlib
import hmac
import urllib.parse
from collections.abc import Callable

_PLAIN = "/-_.~"
"""What stands in the path of an object as it is."""


def make_signer(url: str, key: str, secret: str) -> Callable[[str], str] | None:
    """What signs the address of another key like the one of `key`; None where that is not known."""
    parts = urllib.parse.urlsplit(url)
    query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
    signature, encoded = query.pop("X-Amz-Signature", ""), urllib.parse.quote(key, _PLAIN)
    known = query.get("X-Amz-Algorithm") == "AWS4-HMAC-SHA256" and query.get("X-Amz-SignedHeaders") == "host"
    if not (signature and known and key and parts.path.endswith("/" + encoded)):
        return None
    lead, scope = parts.path[: -len(encoded)], query["X-Amz-Credential"].split("/", 1)[1]
    signing = f"AWS4{secret}".encode()
    for word in scope.split("/"):
        signing = hmac.digest(signing, word.encode(), "sha256")
    told = "&".join(f"{name}={urllib.parse.quote(value, '-_.~')}" for name, value in sorted(query.items()))

    def sign(other: str) -> str:
        path = lead + urllib.parse.quote(other, _PLAIN)
        request = f"GET\n{path}\n{told}\nhost:{parts.netloc}\n\nhost\nUNSIGNED-PAYLOAD"
        digest = hashlib.sha256(request.encode()).hexdigest()
        text = f"AWS4-HMAC-SHA256\n{query['X-Amz-Date']}\n{scope}\n{digest}"
        made = hmac.digest(signing, text.encode(), "sha256").hex()
        return f"{parts.scheme}://{parts.netloc}{path}?{told}&X-Amz-Signature={made}"

    return sign if sign(key).endswith(signature) else None
