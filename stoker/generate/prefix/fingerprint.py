"""What a kept block depends on beside its tokens, as one digest: blocks of different digests never meet.

Everything that changes a bit of keys, values or states belongs here; what is doubtful belongs here too.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from stoker.generate.prefix.tree import BLOCK_TOKENS, DIGEST_BYTES
from stoker.runtime.snapshot import software

LAYOUT = 1  # of a block's bytes; with the shape of the paged cache it says how to read them


def dependencies(runtime: Any) -> dict[str, Any]:
    """Model, adapter, arithmetic and layout, by name."""
    options, shape = runtime.options, getattr(runtime.kv, "shape", None)
    return {
        "store": runtime.store.fingerprint,
        "adapter": getattr(runtime, "adapter_fingerprint", None),
        "routing": _routing(runtime),
        "activation_bits": options.activation_bits,
        "fuse": options.fuse,
        "kv": None if shape is None else [shape.layers, shape.kv_heads, shape.head_dim],
        "block_tokens": BLOCK_TOKENS,
        "layout": LAYOUT,
        "software": software(),
    }


def _routing(runtime: Any) -> Any:
    """What chose the experts, with everything that changes the choice."""
    rule = getattr(runtime, "rule", None)
    return "gate" if rule is None else rule.about()


def fingerprint_of(runtime: Any) -> bytes:
    text = json.dumps(dependencies(runtime), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
