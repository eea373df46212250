"""Seeds of random streams, derived from names; without torch."""

import hashlib


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from the parts' text: equal parts give equal seeds in every process, others unrelated ones."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
