"""What a server was told when it started, as frozen data, resolved once. Every limit that guards it has its name here.

Knows no model and no HTTP library.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

from stoker.errors import OptionError

MIB = 1 << 20


@dataclass(frozen=True)
class Settings:
    """Sizes in bytes, times in seconds.

    api_key: None lets everybody in. cors: origins of other sites whose scripts may use this server; `*` for all.
    sampling, max_tokens: the server's own defaults, between what a request asks and the model's generation_config.json.
    max_values: JSON values in a body. bodies_bytes: of all bodies that are being read or parsed at one time.
    sse_keep_alive_s: a stream that has nothing to say sends a comment this often. body_s: how long a body may take to
    arrive. load_wait_s: how long a request waits for memory that another model holds.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = None
    cors: tuple[str, ...] = ()
    strict_model: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    log_prompts: bool = False
    max_body_bytes: int = 8 * MIB
    bodies_bytes: int = 64 * MIB
    max_messages: int = 4096
    max_depth: int = 64
    max_values: int = 250_000
    sse_keep_alive_s: float = 5.0
    body_s: float = 60.0
    load_wait_s: float = 60.0
    shutdown_s: float = 30.0

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.strip():
            raise OptionError("the key is empty", where="--api-key", remedy="give a key, or leave the option out")
        if not 0 <= self.port <= 65535:
            raise OptionError("not a port", where="--port", expected="0 to 65535", got=self.port)
        for origin in self.cors:
            if origin != "*" and ("://" not in origin or origin.endswith("/")):
                raise OptionError(
                    "not an origin", where="--cors", expected="such as https://example.org or http://localhost:3000",
                    got=origin,
                )  # fmt: skip

    @property
    def loopback(self) -> bool:
        """Whether only programs on this machine can reach the server."""
        return is_loopback(self.host)


def is_loopback(name: str) -> bool:
    """Whether a host's name or address always means this machine."""
    try:
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False
