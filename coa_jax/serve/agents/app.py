"""Serves agent programs over HTTP: chat completions, and a route by which they report rewards."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from coa_jax.data.trajectory import StopReason, Trajectory
from coa_jax.serve.agents.program import MODEL, ProgramError, ProgramOutcome
from coa_jax.serve.agents.session import AgentSession
from coa_jax.serve.app import handle_errors
from coa_jax.serve.chat import chat_completion, read_messages
from coa_jax.serve.client_requests import check_length, make_served_request
from coa_jax.serve.errors import error_response
from coa_jax.serve.http.bodies import parse_json
from coa_jax.serve.http.errors import Refused
from coa_jax.serve.http.guard import Guard, GuardRules, body_of
from coa_jax.serve.http.refusals import RefusalLog
from coa_jax.serve.samples import Event, ServedRequest
from coa_jax.serve.schema import ChatRequest
from coa_jax.serve.service import Service


class Sessions(Service):
    """Serves chat completions of the policy to many agent programs, each with its own session.

    A session records the conversations of a program for one sample, as a tree: conversations that
    begin with the same turns share them. The metadata of each request contain its ``session`` and
    its ``place``, that is, the turn in the tree after which the request continues.
    """

    def prepare(self, session: AgentSession, _: Service, body: ChatRequest) -> ServedRequest:
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
        if session.asked > session.most:
            session.ended_by = session.ended_by or StopReason.TURNS
            raise Refused(400, f"a session may make {session.most} requests (agent.max_requests)")
        try:
            before, new = session.known(messages)
            check_length(self.model.tokenizer, [text for _, text in new], length, "messages")
            place = session.place(before, new)
            prompt = place.prompt
            free = length - len(prompt)
            if free < 1:
                raise Refused(
                    400, f"the conversation has {len(prompt)} tokens; this model's maximum "
                    f"context length is {length} tokens", "messages"
                )  # fmt: skip
        except Refused:
            session.ended_by = session.ended_by or StopReason.LENGTH
            raise
        limit = min(body.limit or free, free)
        return dataclasses.replace(
            make_served_request(self, body, prompt, limit, calls=body.calls),
            task=session.request.task,
            seed=session.request.seed,
            prompt_id=place.number,
            sampling=session.request.sampling,
            metadata={"session": session, "place": place},
        )

    async def events(self, served: ServedRequest) -> AsyncGenerator[Event, None]:
        """Runs a chat request, and yields its events as `Service.events` does.

        Each completion is recorded in the session before the method yields it.
        """
        session: AgentSession = served.metadata["session"]
        if session.closed:  # the session was closed while its request was being read
            raise Refused(401, "the session has ended")
        texts: dict[int, str] = defaultdict(str)
        async with contextlib.aclosing(super().events(served)) as events:
            async for event in events:
                texts[event.sample] += event.text
                answer = event.trajectory
                if answer is not None and answer.stop_reason is StopReason.FAULT:
                    session.ended_by = StopReason.FAULT
                elif answer is not None and answer.stop_reason is not StopReason.CANCELLED:
                    session.add(served.metadata["place"], texts[event.sample], answer)
                yield event

    def _submit(self, served: ServedRequest) -> None:
        served.metadata["session"].in_engine += len(served.samples)
        super()._submit(served)

    def _ended(self, trajectory: Trajectory) -> None:
        # The session keeps the trajectory, which must not keep the session: only the garbage
        # collector would free such a cycle.
        trajectory.metadata.pop("session").in_engine -= 1

    def running(self, session: AgentSession) -> list[ServedRequest]:
        """Returns the requests of a session whose completions are still being sampled."""
        return [served for served in self._served_requests if served.metadata["session"] is session]


def make_app(service: Sessions, sessions: Mapping[str, AgentSession], log: RefusalLog) -> FastAPI:
    """Creates the web application (ASGI) that agent programs call.

    Args:
        service: serves the completions.
        sessions: the open sessions by their keys. Every request must carry such a key as its bearer
            token.
        log: log of refused requests.
    """
    app = FastAPI(openapi_url=None)

    def session_of(request: Request) -> AgentSession:
        key = request.headers.get("authorization", "").partition(" ")[2].strip()
        if key not in sessions:  # the program has ended while the body arrived
            raise Refused(401, "the session has ended")
        return sessions[key]

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        session = session_of(request)
        prepare = functools.partial(service.prepare, session)
        try:
            return await chat_completion([service], request, prepare)
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
            outcome = ProgramOutcome.read(parse_json(body_of(request.scope), 1000, 1000))
        except ProgramError as error:
            raise Refused(400, f"the body is not valid: {error}") from None
        session.given = outcome.over(session.given)
        return JSONResponse({"status": "ok"})

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    handle_errors(app)
    rules = GuardRules(
        api_key=sessions.__contains__,
        local=False,  # requests of other machines have a key, too
        max_body=service.config.body_limit,
        routes=("/health", "/reward", "/v1/models", "/v1/chat/completions"),
        open=("/health",),
        limits=service.config.limits,
    )
    app.add_middleware(Guard, rules=rules, answer=error_response, log=log)
    return app
