"""`make chart` writes docs/reference/routes.md from the routes of `webhook/web/app.py`; a test compares."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from scripts.chart_values import ROOT
from scripts.fuzz.targets import applications, declared_routes
from webhook.web.callers import Guard

LISTENERS: Final[Mapping[str, str]] = {
    "tls_app": "TLS",
    "plain_app": "plain",
    "extender_app": "extender",
    "plain_extender_app": "`--extender-plain-address`",
    "scorer_app": "`score`",
    "probes_app": "`reconcile`, `certs keep`",
}
# Their gate admits every caller.
OPEN: Final = {"plain_extender_app"}
GUARDS: Final[Mapping[Guard, str]] = {
    Guard.OPEN: "everyone",
    Guard.REVIEWER: "everyone, or the API server only if you require it",
    Guard.CALLER: "callers with a bearer token",
    Guard.PERSON: "callers with a bearer token; browsers ask for it as a password",
    Guard.SCHEDULER: "schedulers with a bearer token or a client certificate",
}
HEAD: Final = """\
# Routes

`make chart` writes this page from `webhook/web/app.py`. The last column is the guard of the route in a cluster.
[access.md](../how-to/access.md#who-may-call) describes which rights a route checks besides. `/evidence` and
`/evidence/challenge` exist only with `--evidence jwt-svid`. `gpuwarden export` has a listener of its own
(`--server-port`), open to everyone: `/metrics`, `/healthz`, `/health`, `/readyz`, `/ready`, and `/`, which answers as
`/healthz`.

| route | listener | who may call it |
|---|---|---|
"""


def reference() -> str:
    listeners: dict[tuple[str, str, str], list[str]] = {}
    for name, listener in LISTENERS.items():
        for route in declared_routes(name, applications()[name]):
            caller = GUARDS[Guard.OPEN if name in OPEN else route.guard]
            listeners.setdefault((route.path, route.method, caller), []).append(listener)
    return HEAD + "".join(
        f"| `{method} {path}` | {', '.join(found)} | {caller} |\n"
        for (path, method, caller), found in sorted(listeners.items())
    )


def written() -> dict[Path, str]:
    return {ROOT / "docs/reference/routes.md": reference()}
