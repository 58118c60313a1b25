"""The corpus of `make fuzz`: each input is parsed, or rejected with an error that its parser declares."""

import re
import sys
from pathlib import Path
from random import Random
from types import FrameType

import pytest

from scripts.fuzz.__main__ import tried
from scripts.fuzz.corpus import seeds
from scripts.fuzz.mutations import mutated
from scripts.fuzz.parsers import PARSERS, Parser


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_every_corpus_input_is_parsed_or_rejected_with_a_declared_error(parser: Parser) -> None:
    assert [wrong for content in seeds(parser.seeds) for wrong in tried(parser, content)] == []


def test_same_seed_gives_the_same_inputs() -> None:
    first, again = (
        [mutated(one, random) for one in seeds("reviews") for _ in range(5)] for random in (Random(7), Random(7))
    )
    assert first == again
    assert len(set(first)) > len(first) // 2


def test_undeclared_exception_of_a_parser_is_a_finding() -> None:
    def broken(content: bytes) -> object:
        raise KeyError(content)

    wrong = tried(Parser("broken", broken, "hashes"), b"x", keeps=False)
    assert len(wrong) == 1
    assert wrong[0].startswith("broken: KeyError")


ROOT = Path(__file__).resolve().parents[2]
# Calls with which a module parse external text or objects.
READS = re.compile(
    r"msgspec\.convert\(|msgspec\.json\.decode\(|Decoder\(|object_in\(|[^_]decoded\(|yaml\.safe_load|"
    r"load_(?:der|pem)_x509|certificates?_in\(|fields_of\(|ElementTree|expat|json\.loads\("
)
# Modules that no parser of `make fuzz` reaches, with the reason.
ELSEWHERE = {
    **dict.fromkeys(("webhook/web/explain.py", "webhook/web/evidence.py", "webhook/commands/score.py"), "a route"),
    **dict.fromkeys(
        ("webhook/kube/install/crds.py", "webhook/kube/install/policies/__init__.py", "webhook/runtime/tls/issuing.py"),
        "a file of its own",
    ),
    **dict.fromkeys(
        ("webhook/runtime/tls/certificate_source.py", "webhook/runtime/setting_kinds.py", "webhook/commands/record.py"),
        "what the operator has written",
    ),
    "webhook/export/outbox.py": "a file of its own: tests/export/test_outbox.py damages it",
    "webhook/kube/watch.py": "around objects: tests/kube/test_watch_faults.py",
    "webhook/kube/requests.py": "around objects: tests/kube/test_election.py",
    "webhook/admission/kueue/api_checks.py": "around objects: tests/admission/kueue/test_api_checks.py",
    "webhook/evidence/spire/workload_api.py": "around SVIDs: tests/evidence/spire/test_workload_api.py",
    "webhook/evidence/jwt/bundle_endpoint.py": "around bundles: tests/evidence/jwt/test_bundle_endpoint.py",
    "webhook/node/attest.py": "the server that a node was given: tests/node/test_attest.py",
    "webhook/commands/certs.py": "around Secrets: tests/commands/test_certs.py",
    "webhook/commands/explain/sources.py": "the server that a person has named: tests/commands/test_explain.py",
    "webhook/commands/explain/dry_run.py": "the API server that a person has named: tests/e2e/test_explain_server.py",
}


def reading_modules() -> set[str]:
    found = (ROOT / "webhook").rglob("*.py")
    return {str(one.relative_to(ROOT)) for one in found if READS.search(one.read_text())}


def reached() -> set[str]:
    """The modules that run while the corpus is parsed."""
    files: set[str] = set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    for parser in PARSERS:
        for content in seeds(parser.seeds):
            sys.setprofile(profile)
            try:
                tried(parser, content, keeps=False)
            finally:
                sys.setprofile(None)
    return {str(Path(one).relative_to(ROOT)) for one in files if one.startswith(str(ROOT / "webhook"))}


def test_every_module_that_parses_external_input_is_fuzzed() -> None:
    modules, entered = reading_modules(), reached()
    assert modules - entered - ELSEWHERE.keys() == set(), "give it a Parser, or say here who else tries it"
    assert ELSEWHERE.keys() - modules == set(), "reads nothing any more"
    assert ELSEWHERE.keys() & entered == set(), "is fuzzed by now"
