"""The benchmarks that call parts of the server in this process still fit them. `make bench-check` has the limits."""

from bench import decision, extender


async def test_decision_benchmark_reviews_pods() -> None:
    found = await decision.measured(decision.Plan(sizes=(16, 32), rounds=1, pods=20, rare=1))
    assert [one["gpus"] for one in found["sizes"]] == [16, 32]
    assert all(target.sentence for target in decision.targets(found, 1.0))


async def test_extender_benchmark_filters_nodes() -> None:
    found = await extender.measured(extender.Plan(rounds=1, pods=1, objects=1))
    assert set(found["filter_ms"]) >= {"no claim", "a hash"}
