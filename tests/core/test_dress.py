"""A dressed pod keeps its user's fields, runs on its own node only, and does not change if it is dressed again."""

import copy
import time
from typing import Any

import jsonpatch
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tests.builders import (
    REQUIRED,
    claim,
    expression,
    on_node,
    pod,
    raw_container,
    raw_env,
    raw_pod,
    raw_sidecar,
    required_affinity,
    term,
)
from webhook.core.claim import Claim, ClaimRules
from webhook.core.claim_keys import ClaimRecord
from webhook.core.dress import (
    Allocation,
    DressRules,
    changes,
    dressed,
    nodes_pinned_to,
    pinned,
    replaced_env_warnings,
    undressed,
    undressed_with_claim,
    unpinned,
)
from webhook.core.injection import Injection
from webhook.core.nodes_asked import NodesAsked
from webhook.core.pod import Pod

Raw = dict[str, Any]

RULES = DressRules()
CUDA = DressRules(injection=Injection.CUDA)
UUIDS = ("GPU-1", "GPU-2")
HIDDEN = raw_env(NVIDIA_VISIBLE_DEVICES="void")
BOTH = [
    {"name": "NVIDIA_VISIBLE_DEVICES", "value": "GPU-1,GPU-2"},
    {"name": "CUDA_VISIBLE_DEVICES", "value": "GPU-1,GPU-2"},
]


def outfit(**asked: int) -> Allocation:
    return Allocation(Claim(ClaimRecord(gpus=2, asked=asked)), ("node-a",), "r-1", UUIDS)


def in_dra(fit: Allocation) -> Allocation:
    """The same with a ResourceClaim."""
    claim = evolve(fit.claim, record=structs.replace(fit.claim.record, injection="dra"))
    return evolve(fit, claim=claim, claim_name="gpuwarden-0b2f3c46-0000-4000-8000-00000000000a")


PROVEN = Allocation(Claim(ClaimRecord(hashes=("sha256:aa11",))), ("node-a", "node-b"))


def worn(raw: Raw, fit: Allocation | None = None, rules: DressRules = RULES) -> Raw:
    """The pod after the patch. It equals the dressed pod, and dressing it again changes nothing."""
    fit = fit or outfit()
    kept = copy.deepcopy(raw)
    clothed = dressed(raw, fit, rules)
    assert raw == kept, "dressing has changed its input"
    patched: Raw = jsonpatch.JsonPatch(changes(raw, clothed)).apply(raw)
    assert patched == clothed
    assert changes(patched, dressed(patched, fit, rules)) == []
    return patched


def env_of(raw: Raw, group: str = "containers", position: int = 0) -> Any:
    return raw["spec"][group][position].get("env")


# Annotations.


def test_annotations_are_written_under_all_names() -> None:
    assert worn(raw_pod())["metadata"]["annotations"] == {
        "gpuwarden.io/claim": '{"gpus":2}',
        "gpuwarden.io/reservation-id": "r-1",
        "fudo.org/gpu.reservation-id": "r-1",
        "gpuwarden.io/gpu-uuid": "GPU-1,GPU-2",
        "fudo.org/gpu.uuid": "GPU-1,GPU-2",
        "gpuwarden.io/node": "node-a",
        "fudo.org/gpu.node": "node-a",
    }


def test_aliases_are_written_only_if_enabled() -> None:
    assert worn(raw_pod(), rules=DressRules(writes_aliases=False))["metadata"]["annotations"] == {
        "gpuwarden.io/claim": '{"gpus":2}',
        "gpuwarden.io/reservation-id": "r-1",
        "gpuwarden.io/gpu-uuid": "GPU-1,GPU-2",
        "gpuwarden.io/node": "node-a",
    }


@pytest.mark.defect("assigner-9")
def test_the_users_annotations_stay() -> None:
    raw = raw_pod(annotations={"team": "vision", "a/b~c": "x", "a/b": "", "~1": "y"})
    kept = worn(raw)["metadata"]["annotations"]
    assert {key: kept[key] for key in ("team", "a/b~c", "a/b", "~1")} == {
        "team": "vision",
        "a/b~c": "x",
        "a/b": "",
        "~1": "y",
    }


@pytest.mark.defect("X-1")
def test_keys_with_slash_and_tilde_are_escaped_in_the_patch() -> None:
    raw = raw_pod(annotations={"gpuwarden.io/node": "old", "a~b/c": "x"})
    paths = {step["path"] for step in changes(raw, dressed(raw, outfit(), RULES))}
    assert {"/metadata/annotations/gpuwarden.io~1node", "/metadata/annotations/fudo.org~1gpu.uuid"} <= paths
    without = undressed(raw_pod(annotations={"a~b/c": "x"}))
    assert changes(raw_pod(annotations={"a~b/c": "x", "gpuwarden.io/node": "n"}), without) == [
        {"op": "remove", "path": "/metadata/annotations/gpuwarden.io~1node"}
    ]


@pytest.mark.defect("assigner-13")
def test_uuids_are_written_without_a_leading_colon() -> None:
    assert worn(raw_pod())["metadata"]["annotations"]["fudo.org/gpu.uuid"] == "GPU-1,GPU-2"


def test_a_claim_without_gpus_gets_its_record_and_nodes_and_sees_nothing() -> None:
    raw = raw_pod(raw_container(env=raw_env(A="b")), annotations={"team": "x"})
    clothed = worn(raw, PROVEN)
    assert clothed["metadata"]["annotations"] == {"team": "x", "gpuwarden.io/claim": '{"hashes":["sha256:aa11"]}'}
    assert env_of(clothed, "containers", 0) == [*raw_env(A="b"), *HIDDEN]


def test_undressing_removes_our_annotations() -> None:
    forged = {"gpuwarden.io/gpu-uuid": "GPU-9", "fudo.org/gpu.node": "n", "gpuwarden.io/claim": "{}", "team": "x"}
    assert undressed(raw_pod(annotations=forged))["metadata"]["annotations"] == {"team": "x"}


def test_copy_of_a_dressed_pod_has_the_same_claim() -> None:
    raw = raw_pod(raw_container(gpus=2), annotations={"team": "x"})
    clean, first = undressed_with_claim(raw, Pod.parse(raw), ClaimRules())
    assert (clean, first is not None and first.count) == (raw, 2)
    copied = dressed(raw, outfit(main=2), RULES)
    clean, again = undressed_with_claim(copied, Pod.parse(copied), ClaimRules())
    assert clean["metadata"]["annotations"] == {"team": "x"}
    assert again is not None
    assert first is not None
    assert again.record == first.record


@pytest.mark.parametrize("record", ["{}", "[]", "not ours", '{"gpus":9,"asked":{"another":9}}'])
def test_forged_record_makes_no_claim(record: str) -> None:
    raw = raw_pod(annotations={"gpuwarden.io/claim": record})
    assert undressed_with_claim(raw, Pod.parse(raw), ClaimRules()) == (undressed(raw), None)


def test_forged_alias_is_removed_if_aliases_are_not_written() -> None:
    raw = raw_pod(annotations={"fudo.org/gpu.uuid": "GPU-of-another"})
    assert "fudo.org/gpu.uuid" not in worn(raw, rules=DressRules(writes_aliases=False))["metadata"]["annotations"]


# Affinity.


@pytest.mark.parametrize(
    ("affinity", "terms"),
    [
        pytest.param(None, [on_node("node-a")], id="none"),
        pytest.param({}, [on_node("node-a")], id="empty"),
        pytest.param({"nodeAffinity": None}, [on_node("node-a")], id="null"),
        pytest.param({"nodeAffinity": {REQUIRED: None}}, [on_node("node-a")], id="null-required"),
        pytest.param(
            required_affinity(term(expression("a", "Exists")), term(expression("b", "Exists"))),
            [
                term(expression("a", "Exists"), fields=[expression("metadata.name", "In", "node-a")]),
                term(expression("b", "Exists"), fields=[expression("metadata.name", "In", "node-a")]),
            ],
            id="anded-into-every-term",
        ),
        pytest.param(required_affinity(on_node("node-a")), [on_node("node-a")], id="pinned-already"),
        pytest.param(
            required_affinity(term(fields=[expression("metadata.name", "NotIn", "node-b")])),
            [
                term(
                    fields=[expression("metadata.name", "NotIn", "node-b"), expression("metadata.name", "In", "node-a")]
                )
            ],
            id="another-field-expression-stays",
        ),
        pytest.param(required_affinity({}), [{}], id="an-empty-term-is-never-widened"),
        pytest.param(
            required_affinity({"matchExpressions": [], "matchFields": None}),
            [{"matchExpressions": [], "matchFields": None}],
            id="nor-one-of-empty-lists",
        ),
        pytest.param(
            required_affinity({}, term(expression("a", "Exists"))),
            [{}, term(expression("a", "Exists"), fields=[expression("metadata.name", "In", "node-a")])],
            id="an-empty-term-beside-a-full-one",
        ),
        pytest.param({"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": []}}}, [], id="no-terms-stay-no-terms"),
    ],
)
def test_node_is_added_to_each_affinity_term(affinity: Raw | None, terms: list[Raw]) -> None:
    clothed = worn(raw_pod(affinity=affinity))
    assert clothed["spec"]["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"] == terms


TWO_NAMES = required_affinity(on_node("node-b"), on_node("node-a"))


@pytest.mark.parametrize(
    "affinity",
    [
        None,
        required_affinity(term(expression("zone", "In", "a"))),
        required_affinity(term(expression("zone", "In", "a")), term(expression("zone", "In", "b"))),
        required_affinity(term(fields=[expression("metadata.name", "NotIn", "node-z")])),
        {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}, "podAffinity": {}},
    ],
    ids=["none", "a-term", "two-terms", "a-name-shut-out", "other-affinity"],
)
def test_unpinning_restores_the_affinity(affinity: Raw | None) -> None:
    bare = raw_pod(raw_container(gpus=1), affinity=affinity)
    free = unpinned(dressed(bare, outfit(main=1), RULES), "node-a")
    assert NodesAsked.of(Pod.parse(free)) == NodesAsked.of(Pod.parse(bare))
    assert free["spec"]["affinity"].get("podAffinity") == (affinity or {}).get("podAffinity")
    assert not claim(bare).record.named


def test_a_term_for_another_node_can_match_nothing_afterwards() -> None:
    clothed = dressed(raw_pod(affinity=TWO_NAMES), outfit(), RULES)
    assert clothed["spec"]["affinity"] == required_affinity(
        term(fields=[expression("metadata.name", "In", "node-b"), expression("metadata.name", "In", "node-a")]),
        on_node("node-a"),
    )


def test_a_pod_that_names_two_nodes_is_dressed_once() -> None:
    worn(raw_pod(affinity=TWO_NAMES))


def test_empty_term_allows_no_node() -> None:
    clothed = dressed(raw_pod(affinity=TWO_NAMES), outfit(), RULES)
    assert nodes_pinned_to(clothed) == {"node-a"}


def test_every_other_affinity_stays() -> None:
    affinity = {
        "podAntiAffinity": {REQUIRED: [{"topologyKey": "zone"}]},
        "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": {}}]},
    }
    assert worn(raw_pod(affinity=affinity))["spec"]["affinity"] == {
        "podAntiAffinity": {REQUIRED: [{"topologyKey": "zone"}]},
        "nodeAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": {}}],
            REQUIRED: {"nodeSelectorTerms": [on_node("node-a")]},
        },
    }


@pytest.mark.defect("assigner-10")
def test_dressing_does_not_set_node_name() -> None:
    assert "nodeName" not in worn(raw_pod())["spec"]


def test_several_proven_nodes_are_one_term_each() -> None:
    assert pinned({}, ("node-a", "node-b")) == required_affinity(on_node("node-a"), on_node("node-b"))
    assert pinned(required_affinity(term(expression("a", "Exists"))), ("node-a", "node-b")) == required_affinity(
        term(expression("a", "Exists"), fields=[expression("metadata.name", "In", "node-a")]),
        term(expression("a", "Exists"), fields=[expression("metadata.name", "In", "node-b")]),
    )


@pytest.mark.parametrize(
    ("terms", "names"),
    [
        pytest.param([on_node("a"), on_node("b")], {"a", "b"}, id="two"),
        pytest.param([on_node("a"), term(expression("zone", "Exists"))], {"a", None}, id="one-term-leaves-it-open"),
        pytest.param([on_node("a"), {}], {"a"}, id="an-empty-term-opens-nothing"),
        pytest.param([{}], {None}, id="only-an-empty-term"),
        pytest.param([], {None}, id="none"),
        pytest.param([term(fields=[expression("metadata.name", "In", "a", "b")])], {None}, id="two-in-one"),
        pytest.param([term(fields=[expression("metadata.name", "NotIn", "a")])], {None}, id="all-but-one"),
    ],
)
def test_the_nodes_a_pod_is_pinned_to_are_read_back(terms: list[Raw], names: set[str | None]) -> None:
    assert nodes_pinned_to(raw_pod(affinity=required_affinity(*terms))) == names


# Containers.


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param(None, BOTH, id="none"),
        pytest.param(raw_env(A="b"), [{"name": "A", "value": "b"}, *BOTH], id="the-users-own-stay"),
        pytest.param(
            raw_env(CUDA_VISIBLE_DEVICES="0", A="$(CUDA_VISIBLE_DEVICES)"),
            [BOTH[1], {"name": "A", "value": "$(CUDA_VISIBLE_DEVICES)"}, BOTH[0]],
            id="ours-stands-where-the-users-stood",
        ),
        pytest.param(
            [{"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
            BOTH,
            id="value-from-is-replaced-as-a-whole",
        ),
        pytest.param(
            [{"name": "NVIDIA_VISIBLE_DEVICES", "value": None, "valueFrom": None}], BOTH, id="nulls-are-replaced-too"
        ),
        pytest.param(
            [*raw_env(NVIDIA_VISIBLE_DEVICES="all", A="b"), *raw_env(NVIDIA_VISIBLE_DEVICES="1")],
            [BOTH[0], {"name": "A", "value": "b"}, BOTH[1]],
            id="each-stands-once",
        ),
        pytest.param([*BOTH, *BOTH], BOTH, id="even-if-all-are-right"),
        pytest.param(
            raw_env(NVIDIA_VISIBLE_DEVICES="void", CUDA_VISIBLE_DEVICES="-1"), BOTH, id="hiding-ones-give-way-too"
        ),
    ],
)
def test_container_variables_name_the_reserved_gpus(env: list[Raw] | None, expected: list[Raw]) -> None:
    assert env_of(worn(raw_pod(raw_container(env=env)))) == expected


def test_without_a_request_every_container_gets_the_gpus() -> None:
    raw = raw_pod(raw_container("a"), raw_container("b"), init=[raw_container("i"), raw_sidecar("s")])
    clothed = worn(raw)
    assert [
        env_of(clothed, *at)
        for at in (("containers", 0), ("containers", 1), ("initContainers", 0), ("initContainers", 1))
    ] == [BOTH] * 4


def test_only_containers_that_asked_get_the_gpus() -> None:
    raw = raw_pod(raw_container("a", gpus=1), raw_container("b"), init=[raw_container("i"), raw_sidecar("s", gpus=1)])
    clothed = worn(raw, outfit(a=1, s=1))
    assert env_of(clothed, "containers", 0) == BOTH
    assert env_of(clothed, "initContainers", 1) == BOTH
    assert env_of(clothed, "containers", 1) == HIDDEN
    assert env_of(clothed, "initContainers", 0) == HIDDEN


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param(raw_env(NVIDIA_VISIBLE_DEVICES="all"), BOTH, id="all"),
        pytest.param(raw_env(CUDA_VISIBLE_DEVICES="0"), [BOTH[1], BOTH[0]], id="an-index"),
        pytest.param([], HIDDEN, id="nothing"),
        pytest.param(raw_env(NVIDIA_VISIBLE_DEVICES="void", A="1"), [*HIDDEN, *raw_env(A="1")], id="void"),
        pytest.param(raw_env(NVIDIA_VISIBLE_DEVICES="void") * 2, HIDDEN, id="void-twice"),
        pytest.param(raw_env(NVIDIA_VISIBLE_DEVICES="none"), HIDDEN, id="none"),
        pytest.param(raw_env(CUDA_VERSION="12.4"), [*raw_env(CUDA_VERSION="12.4"), *HIDDEN], id="CUDA_VERSION"),
        pytest.param(raw_env(CUDA_VISIBLE_DEVICES=""), [*raw_env(CUDA_VISIBLE_DEVICES=""), *HIDDEN], id="empty"),
        pytest.param(
            raw_env(CUDA_VISIBLE_DEVICES="-1"), [*raw_env(CUDA_VISIBLE_DEVICES="-1"), *HIDDEN], id="minus-one"
        ),
        pytest.param(
            [{"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": {"configMapKeyRef": {"name": "x", "key": "y"}}}],
            BOTH,
            id="from-elsewhere",
        ),
    ],
)
def test_container_without_a_request_sees_no_other_gpus(env: list[Raw], expected: list[Raw]) -> None:
    raw = raw_pod(raw_container("a", gpus=2), raw_container("b", env=env))
    assert env_of(worn(raw, outfit(a=2)), "containers", 1) == expected


FROM_A_CONFIG_MAP: list[Raw] = [{"configMapRef": {"name": "all"}}]


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param(None, raw_env(NVIDIA_VISIBLE_DEVICES="void"), id="none"),
        pytest.param(raw_env(A="1"), raw_env(A="1", NVIDIA_VISIBLE_DEVICES="void"), id="others"),
        pytest.param(raw_env(NVIDIA_VISIBLE_DEVICES="none"), HIDDEN, id="its-own"),
        pytest.param(raw_env(NVIDIA_VISIBLE_DEVICES="all"), BOTH, id="all"),
    ],
)
def test_env_from_exposes_no_gpus_to_a_container_without_a_request(env: list[Raw] | None, expected: list[Raw]) -> None:
    side = raw_container("b", env=env, envFrom=FROM_A_CONFIG_MAP)
    clothed = worn(raw_pod(raw_container("a", gpus=2), side), outfit(a=2))
    assert env_of(clothed, "containers", 1) == expected
    assert worn(clothed, outfit(a=2)) == clothed


def test_request_is_removed_from_limits_and_requests() -> None:
    resources = {
        "limits": {"nvidia.com/gpu": "2", "cpu": "1"},
        "requests": {"nvidia.com/gpu": "2", "memory": "1Gi"},
        "claims": [{"name": "other"}],
    }
    raw = raw_pod(raw_container("a", resources=resources), init=[raw_sidecar("s", gpus=1)])
    clothed = worn(raw, outfit(a=2, s=1))
    assert clothed["spec"]["containers"][0]["resources"] == {
        "limits": {"cpu": "1"},
        "requests": {"memory": "1Gi"},
        "claims": [{"name": "other"}],
    }
    assert clothed["spec"]["initContainers"][0]["resources"] == {"limits": {}, "requests": {}}


def test_request_of_a_configured_resource_is_removed() -> None:
    resources = {"limits": {"example.com/gpu": "1", "nvidia.com/gpu": "1"}, "requests": None}
    rules = DressRules(resource="example.com/gpu")
    clothed = worn(raw_pod(raw_container("a", resources=resources)), outfit(a=1), rules)
    assert clothed["spec"]["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": "1"}, "requests": None}


def test_mode_cuda_sets_one_variable_and_leaves_requests() -> None:
    raw = raw_pod(raw_container("a", gpus=2, env=raw_env(NVIDIA_VISIBLE_DEVICES="all")))
    container = worn(raw, outfit(), CUDA)["spec"]["containers"][0]
    assert container["env"] == [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}, BOTH[1]]
    assert container["resources"] == raw["spec"]["containers"][0]["resources"]


def test_injection_values_do_not_change() -> None:
    assert [mode.value for mode in Injection] == ["nvidia", "cuda", "plugin", "dra"]


def test_replaced_variables_give_warnings() -> None:
    there = pod(
        raw_container("a", env=raw_env(NVIDIA_VISIBLE_DEVICES="all", CUDA_VISIBLE_DEVICES="GPU-1,GPU-2")),
        raw_container("b", env=raw_env(NVIDIA_VISIBLE_DEVICES="void")),
        init=[raw_container("i", env=raw_env(CUDA_VISIBLE_DEVICES="0"))],
    )
    assert list(replaced_env_warnings(there, outfit(), RULES)) == [
        "spec.initContainers[0]: gpuwarden replaces the value of CUDA_VISIBLE_DEVICES in container i",
        "spec.containers[0]: gpuwarden replaces the value of NVIDIA_VISIBLE_DEVICES in container a",
    ]


# The patch.


def test_dressed_pod_gets_no_patch() -> None:
    clothed = dressed(raw_pod(), outfit(), RULES)
    assert changes(clothed, dressed(clothed, outfit(), RULES)) == []


def test_patch_of_a_minimal_pod() -> None:
    raw = {"metadata": {"name": "x"}, "spec": {"containers": [{"name": "a"}]}}
    fit = Allocation(Claim(ClaimRecord(gpus=1)), ("node-a",), "r-1", ("GPU-1",))
    patch = changes(raw, dressed(raw, fit, DressRules(writes_aliases=False)))
    assert sorted(patch, key=lambda step: str(step["path"])) == [
        {
            "op": "add",
            "path": "/metadata/annotations",
            "value": {
                "gpuwarden.io/claim": '{"gpus":1}',
                "gpuwarden.io/reservation-id": "r-1",
                "gpuwarden.io/gpu-uuid": "GPU-1",
                "gpuwarden.io/node": "node-a",
            },
        },
        {"op": "add", "path": "/spec/affinity", "value": required_affinity(on_node("node-a"))},
        {
            "op": "add",
            "path": "/spec/containers/0/env",
            "value": [
                {"name": "NVIDIA_VISIBLE_DEVICES", "value": "GPU-1"},
                {"name": "CUDA_VISIBLE_DEVICES", "value": "GPU-1"},
            ],
        },
    ]


MARKED = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}
PLAIN = {"name": "A", "value": "1"}


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(raw_pod(*(raw_container(f"c{n}", env=[MARKED, PLAIN] * 250) for n in range(4))), id="variables"),
        pytest.param(raw_pod(affinity=required_affinity(*([term(expression("a", "Exists")), {}] * 250))), id="terms"),
    ],
)
def test_time_of_the_patch_is_linear_in_the_size_of_the_pod(raw: Raw) -> None:
    began = time.process_time()
    changes(raw, dressed(raw, outfit(), RULES))
    assert time.process_time() - began < 0.2


# Generated pods: null in every optional member, keys that need escapes, any variables and terms.

texts = st.text(alphabet="ab~/.01", max_size=4)
small = st.one_of(st.none(), st.dictionaries(texts, st.sampled_from(["", "1", "x~/y", "GPU-1,GPU-2"]), max_size=3))
ours = st.dictionaries(
    st.sampled_from(["gpuwarden.io/node", "fudo.org/gpu.uuid", "gpuwarden.io/claim", "team"]), texts, max_size=3
)
gpu_names = st.sampled_from(["NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "A", "B"])
env_values: st.SearchStrategy[Raw] = st.one_of(
    st.fixed_dictionaries({"value": st.sampled_from(["", "all", "void", "-1", "GPU-1,GPU-2"])}),
    st.just({"value": None, "valueFrom": None}),
    st.just({"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}),
    st.just({}),
)
envs = st.one_of(
    st.none(), st.lists(st.builds(lambda name, value: {"name": name, **value}, gpu_names, env_values), max_size=4)
)
amounts = st.one_of(st.none(), st.dictionaries(st.sampled_from(["nvidia.com/gpu", "cpu"]), st.sampled_from(["1", "2"])))
resources = st.one_of(st.none(), st.fixed_dictionaries({}, optional={"limits": amounts, "requests": amounts}))


def containers(prefix: str, least: int) -> st.SearchStrategy[Any]:
    one = st.fixed_dictionaries(
        {},
        optional={
            "env": envs,
            "envFrom": st.just(FROM_A_CONFIG_MAP),
            "resources": resources,
            "restartPolicy": st.sampled_from([None, "Always"]),
        },
    )
    return st.lists(one, min_size=least, max_size=3).map(
        lambda many: [{"name": f"{prefix}{n}", **members} for n, members in enumerate(many)]
    )


raw_expressions = st.one_of(
    st.none(), st.lists(st.sampled_from([expression("a", "Exists"), expression("b", "In", "1")]), max_size=2)
)
raw_fields = st.one_of(
    st.none(),
    st.lists(
        st.sampled_from(
            [expression("metadata.name", *asked) for asked in (("In", "node-a"), ("NotIn", "node-a"), ("NotIn", "z"))]
        ),
        max_size=2,
    ),
)
raw_terms = st.fixed_dictionaries({}, optional={"matchExpressions": raw_expressions, "matchFields": raw_fields})
node_affinity = st.fixed_dictionaries(
    {},
    optional={
        REQUIRED: st.one_of(
            st.none(),
            st.fixed_dictionaries(
                {}, optional={"nodeSelectorTerms": st.one_of(st.none(), st.lists(raw_terms, max_size=3))}
            ),
        ),
        "preferredDuringSchedulingIgnoredDuringExecution": st.none(),
    },
)
affinity = st.one_of(
    st.none(), st.fixed_dictionaries({}, optional={"nodeAffinity": st.one_of(st.none(), node_affinity)})
)
raw_pods = st.fixed_dictionaries(
    {},
    optional={
        "metadata": st.one_of(
            st.none(),
            st.fixed_dictionaries({}, optional={"annotations": st.one_of(small, ours), "labels": small, "name": texts}),
        ),
        "spec": st.fixed_dictionaries(
            {"containers": containers("c", 1)},
            optional={
                "initContainers": st.one_of(st.none(), containers("i", 0)),
                "affinity": affinity,
                "nodeSelector": small,
            },
        ),
        "status": st.none(),
    },
)
outfits = st.one_of(
    st.sampled_from([outfit(), outfit(c0=1), outfit(i0=1, c1=1), PROVEN]),
    st.builds(in_dra, st.sampled_from([outfit(), outfit(c0=1), outfit(i0=1, c1=1)])),
    st.builds(lambda n: Allocation(PROVEN.claim, ("node-a", *(f"node-{k}" for k in range(n)))), st.integers(0, 2)),
)
rules = st.builds(DressRules, st.sampled_from(Injection), st.just("nvidia.com/gpu"), st.booleans())


@given(raw_pods, outfits, rules)
@pytest.mark.defect("X-5")
def test_patch_of_any_pod_gives_the_dressed_pod(raw: Raw, fit: Allocation, how: DressRules) -> None:
    Pod.parse(raw)
    worn(raw, fit, how)


@given(raw_pods, outfits, rules)
@pytest.mark.defect("assigner-20")
def test_copy_of_a_dressed_pod_is_dressed_for_its_own_reservation(raw: Raw, fit: Allocation, how: DressRules) -> None:
    copied = dressed(raw, fit, how)
    other = Allocation(fit.claim, ("node-z",), "r-2" if fit.uuids else None, ("GPU-9",) if fit.uuids else ())
    target = dressed(undressed(copied), other, how)
    assert jsonpatch.JsonPatch(changes(copied, target)).apply(copied) == target
    assert target["metadata"]["annotations"].get("gpuwarden.io/reservation-id") == other.reservation_id


@given(raw_pods)
def test_undressing_leaves_everything_else(raw: Raw) -> None:
    bare = undressed(raw)
    assert jsonpatch.JsonPatch(changes(raw, bare)).apply(raw) == bare
    assert bare.get("spec") == raw.get("spec")
    assert not {key for key in bare["metadata"]["annotations"] if key.startswith(("gpuwarden.io/", "fudo.org/gpu."))}
