"""`magnetar.functions`: the names of `pulsar.functions`.

A program's functions are classes that derive from them, and can be called and tested here. Magnetar has no runtime that
would run them: a consumer and a producer do.
"""

from . import context, function, serde

__all__ = ["context", "function", "serde"]
