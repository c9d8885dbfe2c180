"""API keys: their names, permissions, limits, and current use."""

from router.keys.entry import KeyEntry, digest_of
from router.keys.file import KeyFile
from router.keys.limits import KeyLimits
from router.keys.ring import KeyRing
from router.keys.use import KeyUse

__all__ = [
    "KeyEntry",
    "KeyFile",
    "KeyLimits",
    "KeyRing",
    "KeyUse",
    "digest_of",
]
