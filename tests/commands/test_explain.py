"""`gpuwarden explain`: the decision from a shell; every example says what to expect of it, and that is what comes."""

import io
import json
import re
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import yaml
from jsonpatch import apply_patch

from tests.builders import HASH, Raw, raw_container, raw_pod
from tests.conftest import Build
from tests.web.harness import Harness
from webhook import cli
from webhook.admission.manifest_pods import MOST_ORDINALS, pods_made_by
from webhook.commands.explain.sources import NoAnswerError, answer_in

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = [
    path
    for path in sorted((ROOT / "examples").rglob("*.yaml"))
    if any(map(pods_made_by, yaml.safe_load_all(path.read_text())))
]
pytestmark = pytest.mark.usefixtures("restored_logging")

EXPECTED = re.compile(r"expect: (admit|deny)(?: (\w+))?")


def gpuwarden(*arguments: str | Path, stdin: str = "", cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = Path(sys.executable).parent / "gpuwarden"
    env = {"PATH": "/usr/bin:/bin", "HOME": str(cwd)}
    return subprocess.run(
        [command, *arguments], cwd=cwd, capture_output=True, text=True, check=False, input=stdin, env=env
    )


def explain(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The same in this process, which takes a tenth of the time."""
    with chdir(ROOT), redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = cli.main(["explain", *map(str, arguments)])
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def test_every_manifest_with_pods_is_an_example() -> None:
    names = {str(path.relative_to(ROOT / "examples")) for path in EXAMPLES}
    assert names >= {"secure-gpu-pod.yaml", "scoring/job.yaml", "scoring/pod.yaml", "pods/mapped.yaml"}
    assert "inventory.yaml" not in names


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_example_gets_the_verdict_that_it_promises(example: Path) -> None:
    promised = EXPECTED.search(example.read_text())
    assert promised is not None
    verdict, reason = promised[1], promised[2] or "Admitted"
    done = explain(example, "-o", "json")
    assert done.returncode == {"admit": 0, "deny": 1}[verdict], done.stderr
    answer = json.loads(done.stdout)
    assert (answer["verdict"], answer["reason"]) == (verdict, reason)


def test_the_answer_for_a_person_names_every_node() -> None:
    done = explain("examples/pods/attested-h100.yaml")
    assert done.stdout == (
        "admit: 2 GPUs with model=h100 on a node attested as sha256:aa11: "
        "GPU-a0000000-0000-4000-8000-000000000000, GPU-a0000000-0000-4000-8000-000000000001 on node node-a (Admitted)\n"
        "  + node-a: GPU-a0000000-0000-4000-8000-000000000000, GPU-a0000000-0000-4000-8000-000000000001\n"
        "  - node-b: a different hash: sha256:bb22\n"
        "  - node-c: no evidence\n"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kind: Service\n", "no pod, and no object that creates pods"),
        ("a: [", "not YAML"),
        ("- 5\n", "no pod"),
        ("kind: Deployment\nspec: 7\n", "no pod"),
        ("kind: PodList\nitems: null\n", "no pod"),
    ],
    ids=["no pod in it", "not YAML", "a list", "a spec that is none", "an empty list"],
)
def test_file_without_a_pod_is_an_error_in_a_sentence(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "manifest.yaml"
    path.write_text(text)
    done = explain(path)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


MAPPED_SET = """
kind: StatefulSet
apiVersion: apps/v1
metadata: {name: web, namespace: ml}
spec:
  replicas: 2
  template:
    metadata:
      annotations:
        gpu-scheduling-map: |
          0=node-a:0
          1=node1:0
    spec:
      containers: [{name: web, image: registry.example/web:1}]
"""


def test_every_pod_of_a_stateful_set_has_its_line_of_the_map(tmp_path: Path) -> None:
    path = tmp_path / "set.yaml"
    path.write_text(MAPPED_SET)
    done = explain(path, "-o", "json")
    answers = json.loads(done.stdout)
    assert [(one["pod"], one["verdict"], [n["name"] for n in one["nodes"] if n["fits"]]) for one in answers] == [
        ("web-0", "admit", ["node-a"]),
        ("web-1", "admit", ["node-b"]),
    ]
    assert [line for line in explain(path).stdout.splitlines() if not line.startswith("  ")] == [
        "web-0: admit: GPU 0 of node node-a: GPU-a0000000-0000-4000-8000-000000000000 on node node-a (Admitted)",
        "web-1: admit: GPU 0 of node node1: GPU-b0000000-0000-4000-8000-000000000000 on node node-b (Admitted)",
    ]


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ({}, ["web-0"]),
        ({"replicas": 0}, ["web-0"]),
        ({"replicas": 3, "ordinals": {"start": 5}}, ["web-5", "web-6", "web-7"]),
        ({"replicas": "many", "ordinals": 7}, ["web-0"]),
        ({"replicas": -1, "ordinals": {"start": -2}}, ["web-0"]),
        ({"replicas": 10**12}, [f"web-{n}" for n in range(MOST_ORDINALS)]),
    ],
    ids=["one", "none", "from-five", "no-numbers", "below-nothing", "no-end"],
)
def test_a_stateful_set_makes_pods_with_ordinals(spec: Raw, names: list[str]) -> None:
    template = {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": []}}
    pods = pods_made_by({"kind": "StatefulSet", "metadata": {"name": "web"}, "spec": {**spec, "template": template}})
    assert [one["metadata"]["name"] for one in pods] == names
    assert pods[0]["metadata"] == {
        "name": names[0],
        "labels": {"app": "web", "apps.kubernetes.io/pod-index": names[0].removeprefix("web-")},
        "ownerReferences": [
            {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "web", "uid": "", "controller": True}
        ],
    }


def test_yaml_without_end_is_an_error_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text("[" * 5000 + "]" * 5000)
    done = gpuwarden("explain", path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "nested too deeply" in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_file_is_an_error_in_a_sentence() -> None:
    done = gpuwarden("explain", "nowhere.yaml")
    assert done.returncode == 2
    assert "nowhere.yaml: No such file or directory\n" in done.stderr
    assert "Traceback" not in done.stderr


GOOD, BAD = "examples/pods/attested-h100.yaml", "examples/pods/unproven-hash.yaml"


@pytest.mark.parametrize(
    ("arguments", "status", "verdicts"),
    [
        ([GOOD, GOOD], 0, ["admit", "admit"]),
        ([GOOD, BAD], 1, ["admit", "deny"]),
        (["-f", GOOD, "-f", BAD], 1, ["admit", "deny"]),
        ([GOOD, "nowhere.yaml", BAD], 2, ["admit", "deny"]),
        ([GOOD, "examples"], 2, ["admit"]),
    ],
    ids=["admitted", "one-denied", "as-kubectl", "one-missing", "a-directory"],
)
def test_exit_status_of_several_files_is_the_worst(arguments: list[str], status: int, verdicts: list[str]) -> None:
    done = explain(*arguments, "-o", "json")
    found = json.loads(done.stdout)
    answers = found if isinstance(found, list) else [found]
    assert (done.returncode, [one["verdict"] for one in answers]) == (status, verdicts), done.stderr
    assert {one["source"] for one in answers} == {"inventory examples/inventory.yaml"}


def test_manifest_is_read_from_stdin_and_the_namespace_from_the_command_line() -> None:
    pod = raw_pod(raw_container(gpus=1), namespace=None)
    done = gpuwarden("explain", "-", "-n", "not_a_name", stdin=json.dumps(pod))
    assert (done.returncode, "InvalidPod" in done.stdout, "not_a_name" in done.stdout) == (1, True, True)
    done = gpuwarden("explain", "-", stdin=json.dumps(pod))
    assert done.returncode == 0


def test_the_patch_is_shown_and_the_pod_with_the_patch() -> None:
    raw = yaml.safe_load((ROOT / GOOD).read_text())
    patch = json.loads(explain(GOOD, "--show", "patch").stdout)
    pod = yaml.safe_load(explain(GOOD, "--show", "pod").stdout)
    as_json = json.loads(explain(GOOD, "--show", "pod", "-o", "json").stdout)
    ids = ("gpuwarden.io/reservation-id", "fudo.org/gpu.reservation-id")  # of a review, so another one each time
    for one in (pod, as_json, stored := apply_patch(raw, patch)):
        for name in ids:
            one["metadata"]["annotations"].pop(name, None)
    assert pod == as_json == stored != raw
    assert pod["metadata"]["annotations"]["gpuwarden.io/node"] == "node-a"


def test_no_patch_is_printed_for_a_denied_pod() -> None:
    done = gpuwarden("explain", BAD, "--show", "pod")
    assert (done.returncode, done.stdout) == (1, "")
    assert "0 of 3 nodes fit" in done.stderr


def test_unreachable_source_gives_no_verdict(tmp_path: Path) -> None:
    (tmp_path / "pod.json").write_text(json.dumps(raw_pod()))
    nobody = gpuwarden("explain", "pod.json", cwd=tmp_path)
    assert (nobody.returncode, nobody.stdout) == (2, "")
    assert "name --server, --kubeconfig or --inventory" in nobody.stderr
    nowhere = gpuwarden("explain", "pod.json", "--server", "https://127.0.0.1:1", "-o", "json", cwd=tmp_path)
    answer = json.loads(nowhere.stdout)
    assert (nowhere.returncode, answer["verdict"], answer["source"]) == (2, "unknown", "server https://127.0.0.1:1")


ANSWERS: dict[str, bytes] = {
    "no JSON": b"<html>",
    "a list": b"[]",
    "no verdict": b'{"nodes": []}',
    "a verdict of its own": b'{"verdict": "maybe", "nodes": []}',
    "no nodes": b'{"verdict": "admit"}',
    "without end": b"[" * 100_000,
}


@pytest.mark.parametrize("content", ANSWERS.values(), ids=ANSWERS.keys())
def test_unreadable_answer_of_a_server_is_no_verdict(content: bytes) -> None:
    with pytest.raises(NoAnswerError, match="an unreadable answer"):
        answer_in(content, "https://server")


async def test_the_route_answers_the_same_and_reserves_nothing(harness: Harness) -> None:
    raw = raw_pod(raw_container(gpus=2), annotations={"gpuwarden.io/required-hash": HASH})
    answer: Raw = (await harness.tls.post("/explain", json=raw)).json()
    stored = apply_patch(raw, answer.pop("patch"))
    assert stored["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"] == "GPU-a0,GPU-a1"
    assert answer == {
        "verdict": "admit",
        "reason": "Admitted",
        "message": "2 GPUs on a node attested as sha256:aa11: GPU-a0, GPU-a1 on node node-a",
        "warnings": [],
        "hints": [],
        "nodes": [
            {"name": "node-a", "fits": True, "reasons": [], "devices": ["GPU-a0", "GPU-a1"]},
            {
                "name": "node-b",
                "fits": False,
                "reasons": ["a different hash"],
                "devices": [],
                "hash": "sha256:bb22",
            },
            {"name": "node-c", "fits": False, "reasons": ["no evidence"], "devices": []},
        ],
    }
    assert harness.held == []


async def test_the_route_refuses_at_once_the_pods_that_a_review_refuses_at_once(build: Build) -> None:
    harness = await build(injection="cuda")
    raw = raw_pod(raw_container(gpus=1))
    answer: Raw = (await harness.tls.post("/explain", json=raw)).json()
    response = await harness.mutate(raw)
    assert answer["reason"] == response["status"]["reason"] == "InjectionConflict"


async def test_copy_of_a_dressed_pod_is_explained_as_the_mutating_webhook_answers_it(harness: Harness) -> None:
    final = await harness.create(raw_pod(raw_container(gpus=1)))
    copied = raw_pod(name="copy", annotations=final["metadata"]["annotations"])
    answer: Raw = (await harness.tls.post("/explain", json=copied)).json()
    assert (answer["verdict"], answer["message"]) == ("admit", "1 GPU: GPU-a0 on node node-a")
    served = await harness.dress(copied, "another")
    assert served["metadata"]["annotations"]["gpuwarden.io/gpu-uuid"] == "GPU-a0"


async def test_the_route_considers_reservations(harness: Harness) -> None:
    raw = raw_pod(raw_container(gpus=2), annotations={"gpuwarden.io/required-hash": HASH})
    await harness.create(raw)
    answer: Raw = (await harness.tls.post("/explain", json=raw)).json()
    assert (answer["verdict"], answer["reason"]) == ("deny", "NoFreeDevice")
    assert answer["nodes"][0]["reasons"] == ["fewer than 2 free GPUs"]


NO_PODS = {
    "broken": b"{",
    "a list": b"[]",
    "anything": b'{"foo": 1}',
    "a list of pods": b'{"kind": "List", "items": []}',
    "a review": b'{"kind": "AdmissionReview", "request": {"uid": "1"}}',
}


@pytest.mark.parametrize("body", NO_PODS.values(), ids=NO_PODS.keys())
async def test_the_route_rejects_objects_that_are_no_pods(harness: Harness, body: bytes) -> None:
    reply = await harness.tls.post("/explain", content=body)
    assert reply.status_code == 400
    assert reply.json()["error"]


async def test_the_route_names_the_mistakes_in_a_pod(harness: Harness) -> None:
    reply = await harness.tls.post("/explain", json={"spec": {"containers": 5}})
    assert reply.json()["reason"] == "InvalidPod"


async def test_the_route_explains_a_stateful_set_by_the_first_of_its_pods_that_is_denied(harness: Harness) -> None:
    """If none is, by the first."""
    template = {
        "metadata": {"annotations": {"gpu-scheduling-map": "0=node-a:0\n1=node-a:7"}},
        "spec": {"containers": []},
    }
    answers = []
    for replicas in (1, 2):
        whole = {
            "kind": "StatefulSet",
            "metadata": {"name": "web"},
            "spec": {"replicas": replicas, "template": template},
        }
        answers.append((await harness.tls.post("/explain", json=whole)).json())
    assert [(one["verdict"], one["reason"]) for one in answers] == [("admit", "Admitted"), ("deny", "NoMatchingDevice")]


async def test_the_route_explains_the_pods_that_a_controller_would_make(harness: Harness) -> None:
    pod = raw_pod(raw_container(gpus=50))
    template = {"metadata": {"annotations": {}}, "spec": pod["spec"]}
    for whole in (
        {"kind": "Deployment", "spec": {"template": template}},
        {"kind": "CronJob", "spec": {"jobTemplate": {"spec": {"template": template}}}},
    ):
        answer: Raw = (await harness.tls.post("/explain", json=whole)).json()
        assert (answer["verdict"], answer["reason"]) == ("deny", "NoMatchingDevice")
