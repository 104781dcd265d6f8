"""One server process: bind, load, answer, drain, leave."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable

import uvicorn

from replayssm.engine.options import EngineOptions
from replayssm.errors import OptionError
from replayssm.models.loading import LoadedModel
from replayssm.server.app import create_app
from replayssm.server.options import ServerOptions
from replayssm.server.service import Service

BACKLOG = 2048


def bind(options: ServerOptions) -> socket.socket:
    """A listening socket. Raises `OptionError` when the address cannot be had."""
    try:
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(BACKLOG)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(
            f"cannot listen on {options.host} port {options.port}: {reason}; choose another --host or --port"
        ) from None
    made.setblocking(False)
    return made


def address(options: ServerOptions, listening: socket.socket) -> str:
    """Where clients find it."""
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"http://{host}:{listening.getsockname()[1]}"


class Server:
    """An HTTP server for one model.

    Args:
        load: makes the model, in a thread of its own while `/health` says 503.
        name: what the model is called.
        options, engine_options: of server and engine.
        on_ready: called when requests are welcome.
    """

    def __init__(
        self,
        load: Callable[[], LoadedModel],
        name: str,
        options: ServerOptions,
        engine_options: EngineOptions | None = None,
        on_ready: Callable[[Service], None] | None = None,
    ) -> None:
        self.options = options
        self.socket = bind(options)
        self.url = address(options, self.socket)
        self.service = Service(load, name, options, engine_options, on_ready, self.stop)
        config = uvicorn.Config(
            create_app(self.service), log_level="warning", access_log=False, server_header=False, lifespan="on",
            timeout_graceful_shutdown=options.drain_seconds, timeout_keep_alive=30, ws="none",
        )  # fmt: skip
        self._server = uvicorn.Server(config)

    def stop(self) -> None:
        """Take no more requests, let those that run end, leave. Any thread may call it."""
        self._server.should_exit = True

    def run(self) -> None:
        """Serve until SIGTERM, SIGINT or `stop`. Raises why the model could not be loaded, or the engine stopped."""
        if threading.current_thread() is threading.main_thread():
            # uvicorn raises the signal that ended it once more when all is done; a clean end is no failure
            signal.signal(signal.SIGTERM, lambda *_: None)
        try:
            self._server.run(sockets=[self.socket])
        finally:
            self.socket.close()
        if self.service.failure is not None:
            raise self.service.failure
