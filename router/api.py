"""The HTTP front: requests in, answers out as JSON or as a stream of server-sent events.

Everything about HTTP is here and nothing else: routes, API keys, body limits, errors as the OpenAI
API writes them, and what happens when the client goes away (whatever runs for it is cancelled).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from router import completion, openai_api
from router.choices import make_choices, watches
from router.completion import Reply, run_choices
from router.config import RouterSettings
from router.console import pages
from router.console.picture import open_feed
from router.dispatch import Dispatcher
from router.errors import (
    BadRequest,
    ClientGone,
    NotFound,
    RequestError,
    TooLarge,
)
from router.key_file import Keys
from router.keys import OPEN_PATHS, RequireKey
from router.ledger import Ledger, Objectives
from router.metrics import RouterMetrics
from router.observe import Observe, Requests, recorder_of
from router.openai_api import ChatRequest, CompletionRequest, GenerationFields
from router.responses import (
    AsgiResponse,
    error_response,
    on_exception,
    on_http_exception,
    on_request_error,
    query_seconds,
    ready_response,
)
from router.scraping import Scraping, Target, Targets, exposed_router, no_targets
from router.sse import EventStream, unless_disconnected
from router.tokenizer import TemplateError, Tokenizer
from router.version import version
from router.vllm_names import router_view
from router.wire import WorkerCard

Discover = Callable[[], Awaitable[Iterable[WorkerCard]]]

# The framework's own, which environment variables could switch on; ours is in observe and tracing.
NO_TELEMETRY: TelemetryConfig = {
    "tracing": False, "metrics": False, "logs": False, "auto_configure": False,
}  # fmt: skip
Generation = TypeVar("Generation", bound=GenerationFields)

MAX_CHARS_PER_TOKEN = 64  # more than any text has on average
MAX_CONTEXT_UNKNOWN = 8192  # tokens, as long as no worker is there to say its own


def create_api(
    settings: RouterSettings,
    discover: Discover,
    tokenizer: Tokenizer | None = None,
    targets: Targets = no_targets,
) -> FastAPI:
    """The application of one router; its lifespan starts and stops everything.

    ``discover`` returns the cards of all registered workers and is asked twice a second. The
    tokenizer is loaded from the model's folder unless one is given. ``targets``: the metrics ports
    of all workers and routers.
    """
    front = Front(settings, discover, tokenizer)
    scraping = Scraping(front.collector, targets, settings.config.metrics_public)
    # No docs pages: they would load scripts from elsewhere, and the handlers parse for themselves.
    app = FastAPI(
        title="Baton",
        version=version(),
        lifespan=front.lifespan,
        openapi_url=None,
        telemetry=NO_TELEMETRY,
    )
    app.state.front = front
    routes: list[tuple[str, str, Callable[..., Any]]] = [
        ("POST", "/v1/chat/completions", front.chat_completions),
        ("POST", "/v1/completions", front.completions),
        ("GET", "/v1/models", front.models),
        ("GET", "/v1/models/{model_id:path}", front.model),
        ("POST", "/tokenize", front.tokenize),
        ("POST", "/detokenize", front.detokenize),
        ("GET", "/health", front.health),
        ("GET", "/ready", front.ready),
        ("GET", "/version", front.show_version),
        ("GET", "/internal/state", front.state),
        ("GET", "/internal/prometheus/targets", scraping.prometheus_targets),
        ("GET", "/metrics", scraping.metrics),
    ]
    for method, path, handler in routes:
        methods = [method, "HEAD"] if path in ("/health", "/ready") else [method]
        app.add_api_route(path, handler, methods=methods, response_model=None)
    app.router.routes.extend(pages.routes(front.console))
    app.add_exception_handler(RequestError, on_request_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(Exception, on_exception)
    app.add_middleware(
        RequireKey,
        keys=Keys(settings.config.api_keys, settings.config.api_keys_file),
        open_paths=OPEN_PATHS | {"/metrics"} | pages.paths(),
    )
    app.add_middleware(Observe, requests=front.requests)  # the last one added is the outermost
    return app


class Front:
    """The handlers, and what they share."""

    def __init__(
        self, settings: RouterSettings, discover: Discover, tokenizer: Tokenizer | None
    ) -> None:
        self.config = settings.config
        self.dispatcher = Dispatcher(settings, discover)
        self.ledger = Ledger(Objectives(self.config.slo_ttft_s, self.config.slo_tpot_s))
        self.requests = Requests(settings.served_model, self.ledger)
        self.console = open_feed(settings, self.dispatcher.state, self.requests)
        self.metrics = RouterMetrics(settings, self.ledger, self.requests, self.dispatcher)
        self.collector = router_view(settings, self.metrics.registry, self.dispatcher)
        self.target: Target | None = None  # its metrics port, while it is open
        self._settings = settings
        self._loaded = tokenizer
        self._created = int(time.time())

    @contextlib.asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Load the tokenizer, look for workers; at the end close all connections."""
        if self._loaded is None:
            folder = Path(self._settings.model_dir)
            self._loaded = await asyncio.to_thread(Tokenizer.load, folder)
        async with (
            exposed_router(self.collector, self._settings) as self.target,
            self.requests.traced(self._settings),
        ):
            self.metrics.loop_lag.start()
            await self.dispatcher.start()
            try:
                yield
            finally:
                self.console.close()
                self.metrics.loop_lag.stop()
                await self.dispatcher.close()
                self.target = None

    @property
    def tokenizer(self) -> Tokenizer:
        assert self._loaded is not None, "the lifespan has not begun"
        return self._loaded

    # --- generation ------------------------------------------------------------------------------

    async def chat_completions(self, http: Request) -> Response:
        """POST /v1/chat/completions."""
        request = await self._request(http, ChatRequest)
        with self.dispatcher.door.place():
            ids = await self._encode_chat(request)
        return await self._answer(http, request, [ids])

    async def completions(self, http: Request) -> Response:
        """POST /v1/completions."""
        request = await self._request(http, CompletionRequest)
        if len(request.prompts) > self.config.max_prompts:
            raise BadRequest(f"prompt: at most {self.config.max_prompts} prompts", param="prompt")
        for prompt in request.prompts:
            self._check_chars(len(prompt), "prompt")
        special = request.add_special_tokens is not False
        with self.dispatcher.door.place():
            prompts = await asyncio.to_thread(
                lambda: [
                    self.tokenizer.encode(prompt, special) if isinstance(prompt, str) else prompt
                    for prompt in request.prompts
                ]
            )
        for ids in prompts:
            if not ids:
                raise BadRequest("prompt: has no tokens", param="prompt")
            self._check_ids(ids, "prompt")
        return await self._answer(http, request, prompts)

    async def _request(self, http: Request, kind: type[Generation]) -> Generation:
        fields = await self._fields(http)
        openai_api.check_supported(fields)
        request = openai_api.parse(kind, fields)
        openai_api.check_generation(request, self.config)
        return request

    async def _answer(
        self, http: Request, request: GenerationFields, prompts: list[list[int]]
    ) -> Response:
        self._check_ids(request.stop_token_ids or (), "stop_token_ids")
        if len(prompts) * (request.n or 1) > self.config.max_queue:  # they would never all fit
            raise BadRequest(
                f"prompt: prompts times n can be at most {self.config.max_queue}", param="prompt"
            )
        request_id = self._request_id(http, request)
        recorder = recorder_of(http.scope)
        assert recorder is not None, "these paths are observed"
        trace = recorder.trace
        parent = trace.parent if trace is not None else ""
        chat = isinstance(request, ChatRequest)
        reply = Reply(
            id=f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
            chat=chat,
            model=self._settings.served_model,
            created=int(time.time()),
            choices=make_choices(request, prompts, request_id, self.tokenizer, parent),
            prompts=prompts,
            n=request.n or 1,
            return_token_ids=bool(request.return_token_ids),
        )
        headers = {"x-request-id": request_id}
        deltas = run_choices(self.dispatcher.generate, reply.choices)
        if trace is not None:
            trace.answering(request, reply)
        recorder.tokenized(request_id, bool(request.stream), watches(reply))
        if request.stream:
            always, wrote, config = request.usage_in_all_chunks, recorder.wrote, self.config
            chunks = completion.stream(reply, deltas, request.include_usage, always, wrote)
            first_s, silent_s = config.first_token_status_s, config.keep_alive_s
            return AsgiResponse(EventStream(chunks, headers, first_s, silent_s, recorder.failed))

        async def collect() -> None:
            try:
                async for delta in deltas:
                    recorder.wrote(delta.choice.index, bool(delta.finish))
            finally:
                await deltas.aclose()

        try:
            await unless_disconnected(http.receive, collect())
        except RequestError as error:
            recorder.failed(error)
            return error_response(error, headers)
        return JSONResponse(reply.response(), headers=headers)

    # --- text and ids ----------------------------------------------------------------------------

    async def tokenize(self, http: Request) -> Response:
        """POST /tokenize: a text or a conversation to ids."""
        fields = await self._fields(http)
        if "messages" in fields:
            chat = openai_api.parse(openai_api.TokenizeChat, fields)
            ids, strings = await self._encode_chat(chat), chat.return_token_strs
        else:
            text = openai_api.parse(openai_api.TokenizeText, fields)
            self._check_chars(len(text.prompt), "prompt")
            special = text.add_special_tokens is not False
            ids = await asyncio.to_thread(self.tokenizer.encode, text.prompt, special)
            strings = text.return_token_strs
        decode = self.tokenizer.decode
        return JSONResponse(
            {
                "count": len(ids),
                "max_model_len": self.dispatcher.max_context(),
                "tokens": ids,
                "token_strs": [decode([i], False, True) for i in ids] if strings else None,
            }
        )

    async def detokenize(self, http: Request) -> Response:
        """POST /detokenize: ids to text."""
        request = openai_api.parse(openai_api.DetokenizeRequest, await self._fields(http))
        self._check_ids(request.tokens, "tokens")
        text = await asyncio.to_thread(self.tokenizer.decode, request.tokens, False)
        return JSONResponse({"prompt": text})

    async def _encode_chat(self, request: openai_api.ChatFields) -> list[int]:
        messages, kwargs = request.conversation(), request.template_kwargs()
        self._check_chars(len(str(messages)), "messages")
        try:
            ids = await asyncio.to_thread(
                lambda: self.tokenizer.encode_chat(
                    messages,
                    add_generation_prompt=request.add_generation_prompt is not False,
                    **kwargs,
                )
            )
        except TemplateError as error:
            raise BadRequest(f"messages: {error}", param="messages") from None
        if not ids:
            raise BadRequest("messages: the chat template made no text of them", param="messages")
        return ids

    def _check_chars(self, chars: int, param: str) -> None:
        """Refuse what cannot fit before it costs the tokenizer seconds and hundreds of MB."""
        limit = self.dispatcher.max_context() or self.dispatcher.door.longest or MAX_CONTEXT_UNKNOWN
        if chars > limit * MAX_CHARS_PER_TOKEN:
            raise BadRequest(
                f"{param}: {chars} characters exceed the model's maximum context length of "
                f"{limit} tokens",
                param=param,
            )

    def _check_ids(self, ids: Iterable[int], param: str) -> None:
        try:
            self.tokenizer.check_ids(ids)
        except ValueError as error:
            raise BadRequest(f"{param}: {error}", param=param) from None

    # --- the rest --------------------------------------------------------------------------------

    async def models(self) -> dict[str, Any]:
        """GET /v1/models."""
        return {"object": "list", "data": [self._model()]}

    async def model(self, model_id: str) -> dict[str, Any]:
        """GET /v1/models/{id}."""
        self._check_model(model_id)
        return self._model()

    async def health(self) -> dict[str, str]:
        """GET /health: this process lives."""
        return {"status": "ok"}

    async def ready(self, http: Request) -> Response:
        """GET /ready: a pair of workers has passed a real generation, and takes requests. Or there
        is none on purpose, and requests wake one up.

        ``?settled=SECONDS``: and at its start all workers have come, or not within that time.
        """
        settled, dispatcher = query_seconds(http, "settled"), self.dispatcher
        ready = dispatcher.ready if settled is None else dispatcher.settled(settled)
        return ready_response(ready, dispatcher.asleep)

    async def show_version(self) -> dict[str, str]:
        """GET /version."""
        return {"version": version()}

    async def state(self) -> dict[str, Any]:
        """GET /internal/state: workers, pairs and requests as this router sees them now."""
        return {"router": self._settings.router_id, **self.dispatcher.state()}

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._settings.served_model,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "root": self._settings.served_model,
            "parent": None,
            "max_model_len": self.dispatcher.max_context(),
        }

    def _check_model(self, name: object) -> None:
        if name is None or name == self._settings.served_model:
            return
        if not isinstance(name, str):
            raise BadRequest("model: must be a string", param="model")
        raise NotFound(f"the model {name!r:.200} does not exist", "model", "model_not_found")

    async def _fields(self, http: Request) -> dict[str, Any]:
        """The JSON object of a request, after the checks that all of them need."""
        kind = http.headers.get("content-type", "application/json").split(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise BadRequest(f"the content type must be application/json, not {kind:.100}")
        limit = self.config.max_body_bytes
        body = bytearray()
        try:
            async for part in http.stream():
                body += part
                if len(body) > limit:
                    raise TooLarge(f"the body is larger than {limit} bytes")
        except ClientDisconnect:
            raise ClientGone("the client has gone before its request was complete") from None
        if (recorder := recorder_of(http.scope)) is not None:
            recorder.read()
        fields = openai_api.parse_json(bytes(body))
        if recorder is not None:  # also of a request that is refused next
            recorder.stream = fields.get("stream") is True
        self._check_model(fields.get("model"))
        return fields

    def _request_id(self, http: Request, request: GenerationFields) -> str:
        asked = request.request_id or http.headers.get("x-request-id", "")
        return asked if openai_api.REQUEST_ID.fullmatch(asked) else os.urandom(16).hex()
