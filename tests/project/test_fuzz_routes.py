"""`make fuzz` sends requests to every declared route and checks the answers to valid HTTP/2 requests."""

from pathlib import Path
from random import Random

from scripts.fuzz.corpus import CORPUS
from scripts.fuzz.targets import GROUPS, LISTENERS, applications, targets
from scripts.fuzz.wire import Wire, opened, spoken
from tests.running import serving
from tests.web.harness import INVENTORY


def test_every_declared_route_is_fuzzed() -> None:
    assert applications().keys() == LISTENERS.keys(), "say which listener serves it"
    found = targets()
    by_path = {(one.listener, one.path.partition("?")[0]) for one in found}
    assert by_path >= {
        *(("https", path) for path in ("/", "/mutate", "/explain", "/evidence", "/evidence/challenge", "/readyz")),
        *(("http", path) for path in ("/", "/metrics", "/health", "/ready")),
        *(("extender", path) for path in ("/filter", "/bind", "/healthz")),
        ("plain-extender", "/filter"),
        ("scorer", "/v1/score"),
    }
    assert {one.path.partition("?")[0] for one in found if one.group} == GROUPS.keys()
    assert all((CORPUS / group).is_dir() for group in GROUPS.values())


async def test_server_survives_damaged_frames_and_answers_valid_requests(tmp_path: Path) -> None:
    body = (CORPUS / "reviews" / "mutate-gpu.json").read_bytes()
    target = next(one for one in targets() if one.path.startswith("/mutate?"))
    assert opened(target, body).data_to_send().startswith(b"PRI * HTTP/2.0")
    with serving(tmp_path, INVENTORY, ["--log-level", "warn"]) as running:
        wire, random = Wire("https", running.urls["https"], running.trust), Random(3)  # noqa: S311 - the same each time
        said = [await spoken(wire, target, body, random) for _ in range(40)]
        assert {one.how for one in said} == {"h2", "h2, damaged,", "http/1.1, damaged,"}
        assert {one.status for one in said if one.how == "h2"} == {200}
        assert [one for one in said if one.problem] == []
        assert running.process.poll() is None
        assert "Traceback" not in running.log.read_text()
