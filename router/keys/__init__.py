"""API keys: who they belong to, what each may do, and what it uses now."""

from router.keys.entry import KeyEntry, digest_of
from router.keys.file import KeyFile
from router.keys.limits import KeyLimits, KeyUse
from router.keys.ring import KeyRing

__all__ = [
    "KeyEntry",
    "KeyFile",
    "KeyLimits",
    "KeyRing",
    "KeyUse",
    "digest_of",
]
