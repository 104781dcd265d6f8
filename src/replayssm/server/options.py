"""How a server is set up. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from replayssm.checks import at_least
from replayssm.errors import OptionError

MIB = 2**20


@dataclass(frozen=True)
class ServerOptions:
    """Raises `OptionError` with the value and the limit.

    Attributes:
        host, port: to listen on; port 0 takes a free one.
        api_key: that requests must bear; None asks for none.
        served_name: of the model in requests and answers; None takes the one it was loaded by.
        chat_template: file with a Jinja template, instead of the model's.
        max_queue: outputs that may wait for a slot; more are refused with 429.
        max_body: bytes of a request.
        drain_seconds: that running requests get after SIGTERM.
        body_seconds: that a client may take to send a request.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    served_name: str | None = None
    chat_template: Path | None = None
    max_queue: int = 256
    max_body: int = 4 * MIB
    drain_seconds: int = 60
    body_seconds: int = 60

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (isinstance(value, bool) or not isinstance(value, int)):
                raise OptionError(f"{field.name} {value!r} is no whole number")
        if not 0 <= self.port < 65536:
            raise OptionError(f"port {self.port} is outside 0…65535")
        for name, least in (("max_queue", 0), ("max_body", 1024), ("drain_seconds", 0), ("body_seconds", 1)):
            at_least(name, getattr(self, name), least)
        for name in ("host", "served_name", "api_key"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value.strip()):
                raise OptionError(f"{name} {value!r} is empty; leave it out")
        if self.chat_template is not None and not self.chat_template.is_file():
            raise OptionError(f"chat_template {self.chat_template} is no file")
