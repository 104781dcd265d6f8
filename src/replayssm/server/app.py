"""The routes."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from replayssm import __version__
from replayssm.server import endpoints
from replayssm.server.errors import ApiError, validation
from replayssm.server.guard import Guard
from replayssm.server.metrics import registry_of, snapshot
from replayssm.server.page import page_and_policy
from replayssm.server.protocol import ERROR, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from replayssm.server.service import Service

log = logging.getLogger(__name__)
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": ERROR}}}
    for status, text in {
        400: "The request cannot be answered; `param` says why",
        401: "The API key is missing or wrong",
        404: "Another model than the one that is served",
        408: "The request was not sent in time",
        413: "The body is too large",
        429: "The queue is full; see Retry-After",
        500: "The request failed",
        503: "The model is being loaded, or the server is shutting down",
    }.items()
}
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"description": "One object, or server-sent events", "content": {"text/event-stream": {}}}
}


def create_app(service: Service) -> FastAPI:
    """An ASGI application; its lifespan loads the model and closes it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(
        title="replayssm", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, responses=ERRORS
    )
    registry = registry_of(service)
    text, policy = page_and_policy()

    @app.get("/health", responses={200: {"description": "Requests are welcome"}})
    async def health() -> JSONResponse:
        """503 while the model is loaded, and after the engine failed."""
        return JSONResponse({"status": service.phase}, 200 if service.healthy else 503)

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        """The model that is served."""
        return JSONResponse({"object": "list", "data": [_card(service)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        """The same, or 404."""
        service.check_model(name)
        return JSONResponse(_card(service))

    @app.post("/v1/completions", responses=STREAMED)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue texts."""
        return await endpoints.complete(service, body, request.receive)

    @app.post("/v1/chat/completions", responses=STREAMED)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer messages."""
        return await endpoints.chat(service, body, request.receive)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> JSONResponse:
        """Tokens of a text, or of messages."""
        return JSONResponse(await endpoints.tokenize(service, body))

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> JSONResponse:
        """Text of tokens, special ones included."""
        return JSONResponse(endpoints.detokenize(service, body))

    @app.get("/metrics", responses={200: {"content": {"text/plain": {}}}})
    def metrics() -> Response:
        """For Prometheus."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/stats")
    async def stats() -> JSONResponse:
        """For the page: the engine now, and since its start."""
        return JSONResponse(snapshot(service))

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(text, headers={"content-security-policy": policy})

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return validation(list(error.errors()), error.body).response()

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> JSONResponse:
        made = ApiError(error.status_code, str(error.detail), None, None)
        response = made.response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def on_failure(request: Request, error: Exception) -> JSONResponse:
        return ApiError(500, f"unexpected {type(error).__name__}", None, "internal_error").response()

    known = frozenset(route.path for route in app.routes if hasattr(route, "path"))
    app.add_middleware(Guard, service=service, known=lambda: known)
    return app


def _card(service: Service) -> dict[str, Any]:
    assert service.desk
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "replayssm",
        "max_model_len": service.context,
    }
