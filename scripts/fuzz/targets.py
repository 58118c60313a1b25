"""The fuzzed routes of each listener: all routes in `webhook/web/app.py`."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from attrs import frozen

from webhook.web import app
from webhook.web.routes import CountMiddleware, RouteDeclaration

# The application served by each listener of the started processes.
LISTENERS: Final = {
    "tls_app": "https",
    "plain_app": "http",
    "extender_app": "extender",
    "plain_extender_app": "plain-extender",
    "scorer_app": "scorer",
    "probes_app": "scorer",
}
# The corpus group for each route with a body.
GROUPS: Final = {
    "/mutate": "reviews",
    "/mutate-binding": "reviews",
    "/validate": "reviews",
    "/explain": "pods",
    "/finalize": "finalize",
    "/evidence": "answers",
    "/filter": "extender",
    "/prioritize": "extender",
    "/preempt": "extender",
    "/bind": "extender",
    "/v1/score": "questions",
}
QUERIES: Final = {
    "/mutate": "?timeout=10s",
    "/mutate-binding": "?timeout=10s",
    "/validate": "?timeout=10s",
    "/evidence/challenge": "?node=node-a",
}


@frozen
class Target:
    """A route and its corpus group; routes without a group have no body."""

    listener: str
    path: str
    group: str | None = None


class Unused:
    """A placeholder for parts and their endpoints, when routes are only listed."""

    def __getattr__(self, name: str) -> "Unused":
        return Unused()

    async def __call__(self, request: object) -> None:
        raise NotImplementedError


def applications() -> dict[str, Callable[..., object]]:
    return {name: one for name, one in inspect.getmembers(app, inspect.isfunction) if name.endswith("_app")}


def declared_routes(name: str, make: Callable[..., object]) -> Sequence[RouteDeclaration]:
    """All routes that the application can declare, with the optional routes of proofs."""
    asked = [one.name for one in inspect.signature(make).parameters.values() if one.default is one.empty]
    made = make(**{one: Unused() for one in asked})
    if not isinstance(made, CountMiddleware):
        raise TypeError(f"{name} declares no routes")
    return made.declared


def targets() -> tuple[Target, ...]:
    return tuple(target for name, make in applications().items() for target in targets_of(name, make))


def targets_of(name: str, make: Callable[..., object]) -> Iterator[Target]:
    for route in declared_routes(name, make):
        group = GROUPS[route.path] if route.method == "POST" else None
        yield Target(LISTENERS[name], route.path + QUERIES.get(route.path, ""), group)
