"""Serves agent programs over HTTP: chat completions, and a route by which they report rewards."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from coa_jax.agents.program import Outcome, ProgramError
from coa_jax.agents.session import Place, Session
from coa_jax.engine.engine import Engine
from coa_jax.model.api import Model
from coa_jax.protocol import Prompt
from coa_jax.serve.app import handle_errors
from coa_jax.serve.chat import chat_completion, read_messages
from coa_jax.serve.config import ServeConfig
from coa_jax.serve.errors import error_response
from coa_jax.serve.exchange import check_length, make_visit
from coa_jax.serve.samples import Event, Visit
from coa_jax.serve.schema import ChatRequest
from coa_jax.serve.service import Service
from coa_jax.trajectory import StopReason, Trajectory
from coa_jax.web.bodies import parse_json
from coa_jax.web.errors import Refused
from coa_jax.web.guard import Guard, Rules, body_of
from coa_jax.web.refusals import RefusalLog

MODEL = "policy"
"""Name of the model at the endpoint; requests may contain any other name."""

_ROUTES = ("/health", "/reward", "/v1/models", "/v1/chat/completions")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Asked(Visit):
    """A request of an agent program while the rollout loop serves the request.

    Attributes:
        session: session of the program.
        place: point in the session's tree of turns at which the request continues.
    """

    session: Session
    place: Place


class Sessions(Service):
    """Serves the policy to the sessions of many agent programs.

    Attributes:
        by_key: open sessions, by the key that their programs send with each request.
    """

    def __init__(
        self,
        model: Model,
        engines: Sequence[Engine],
        config: ServeConfig,
        version: int,
        most: int,
        *,
        recompute: bool = False,
    ):
        """Sets up the service.

        Args:
            model: the policy; only its tokenizer and its architecture are used.
            engines: decoding engines with the weights of ``version``.
            config: settings of the server.
            version: policy version of the engines' weights.
            most: maximum number of requests per session.
            recompute: whether running requests recompute their KV cache when weights change.
        """
        super().__init__(
            model, engines, (), config, Prompt("brief"), version=version, recompute=recompute
        )
        self.by_key: dict[str, Session] = {}
        self._most = most

    def prepare(self, session: Session, _: Service, body: ChatRequest) -> Visit:
        """Converts the body of a chat request into a request for the rollout loop.

        Callers should call this method in a thread, because it tokenises the new messages. The
        sampling parameters of the run replace those that the program sends, because training must
        know the distribution from which tokens were sampled.

        Args:
            session: session of the program.
            body: body of the chat request.

        Raises:
            Refused: the session has used up its requests, or the policy cannot continue the
                conversation, for example because it is too long.
        """
        length = self.config.engine.max_length
        messages = read_messages(body)
        if messages[-1][0] == "assistant":
            raise Refused(400, "the last message is the assistant's; add a user's", "messages")
        session.asked += 1
        if session.asked > self._most:
            session.ended_by = session.ended_by or StopReason.TURNS
            raise Refused(400, f"a session may make {self._most} requests (agent.max_requests)")
        try:
            before, new = session.known(messages)
            check_length(self.model.tokenizer, [text for _, text in new], length, "messages")
            place = session.place(before, new)
            room = length - len(place.prompt)
            if room < 1:
                raise Refused(
                    400, f"the conversation has {len(place.prompt)} tokens; this model's maximum "
                    f"context length is {length} tokens", "messages"
                )  # fmt: skip
        except Refused:
            session.ended_by = session.ended_by or StopReason.LENGTH
            raise
        visit = make_visit(
            self, body, place.prompt, min(body.limit or room, room), calls=body.calls
        )
        values = {f.name: getattr(visit, f.name) for f in dataclasses.fields(Visit)}
        request = session.request
        values |= {
            "task": request.task,
            "seed": request.seed,
            "prompt_id": place.number,
            "sampling": request.sampling,
            "metadata": {**request.metadata, "session": session.key},
        }
        return Asked(**values, session=session, place=place)

    async def events(self, visit: Visit) -> AsyncGenerator[Event, None]:
        """Runs a request like `Service.events`, but records each completion before yielding it."""
        assert isinstance(visit, Asked)
        if visit.session.closed:  # the session was closed while its request was being read
            raise Refused(401, "the session has ended")
        said: dict[int, str] = defaultdict(str)
        events = super().events(visit)
        try:
            async for event in events:
                said[event.sample] += event.text
                if event.trajectory is not None:
                    self._write_down(visit, said[event.sample], event.trajectory)
                yield event
        finally:
            await events.aclose()

    def _write_down(self, visit: Asked, said: str, answer: Trajectory) -> None:
        session = visit.session
        if answer.stop_reason is StopReason.FAULT:
            session.ended_by = StopReason.FAULT
        elif answer.stop_reason is not StopReason.CANCELLED:
            session.add(visit.place, said, answer)

    def _submit(self, visit: Visit) -> None:
        assert isinstance(visit, Asked)
        visit.session.in_engine += len(visit.samples)
        super()._submit(visit)

    def _ended(self, trajectory: Trajectory) -> None:
        session = self.by_key.get(trajectory.metadata["session"])
        if session is not None:
            session.in_engine -= 1

    def running(self, session: Session) -> list[Asked]:
        """Returns the requests of a session that are running."""
        return [v for v in self._visits if isinstance(v, Asked) and v.session is session]


def make_app(service: Sessions, log: RefusalLog) -> FastAPI:
    """Creates the ASGI application.

    Every request must carry the key of an open session as its bearer token.
    """
    app = FastAPI(openapi_url=None)

    def session_of(request: Request) -> Session:
        key = request.headers.get("authorization", "").partition(" ")[2].strip()
        return service.by_key[key]

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        session = session_of(request)
        prepare = functools.partial(service.prepare, session)
        try:
            return await chat_completion(service, request, prepare)
        except Refused as refusal:
            session.refused = str(refusal)
            raise

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "coa_jax"}
        return {"object": "list", "data": [model]}

    @app.post("/reward")
    async def reward(request: Request) -> Response:
        session = session_of(request)
        try:
            given = Outcome.read(parse_json(body_of(request.scope), 1000, 1000))
        except ProgramError as error:
            raise Refused(400, f"the body is not valid: {error}") from None
        session.given = given.over(session.given)
        return JSONResponse({"status": "ok"})

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    handle_errors(app)
    rules = Rules(
        api_key=service.by_key.__contains__,
        local=False,  # requests of other machines have a key, too
        max_body=service.config.body_limit,
        routes=_ROUTES,
        open=("/health",),
        limits=service.config.limits,
    )
    app.add_middleware(Guard, rules=rules, answer=error_response, log=log)
    return app
