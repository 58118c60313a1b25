"""The claims of a Workload's pods, read from the templates as a review would read the pods."""

from collections.abc import Callable

from attrs import define, field, frozen

from webhook.admission.kueue.workload import AdditionWire, PodSet, Workload, flavor_of
from webhook.admission.namespaces import ClaimReader, NamespacesUnavailableError
from webhook.core import check, claim_keys
from webhook.core.claim import Claim, ClaimRules
from webhook.core.dress import DressRules, undressed_with_claim
from webhook.core.errors import InvalidPodError
from webhook.core.gang import MAX_PODS, GangPart
from webhook.core.pod import Pod
from webhook.kube.view import ObjectView

# Mistakes that one message names.
MAX_MISTAKES = 20


@frozen
class GangRefusal:
    """Why the pods cannot be served, whatever devices are free."""

    why: str
    # Whether only another template can help.
    is_final: bool = True


Gang = tuple[GangPart, ...]


def everywhere(namespace: str) -> bool | None:
    return True


@define(eq=False, repr=False)
class GangReader:
    """Knows the ResourceFlavors, by their watch: Kueue adds their node labels to the pods."""

    _claims: ClaimReader
    _rules: DressRules
    # Whether the namespace has opted in; None if it is not known yet.
    _is_opted_in: Callable[[str], bool | None] = everywhere
    flavors: ObjectView[AdditionWire] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.flavors = ObjectView(flavor_of)

    async def gang(self, one: Workload) -> Gang | GangRefusal | None:
        """None if the watches do not show yet what it depends on."""
        is_opted_in = self._is_opted_in(one.namespace)
        if is_opted_in is None or any(name not in self.flavors for pods in one.pod_sets for name in pods.flavors):
            return None
        if not is_opted_in:
            why = f"namespace {one.namespace} has not opted in: its pods would not be reviewed"
            return GangRefusal(why, is_final=False)
        try:
            rules = await self._claims.within(one.namespace)
            claims = [(self._claim(one.namespace, pods, rules), pods.pods) for pods in one.pod_sets]
        except NamespacesUnavailableError:
            return None
        except InvalidPodError as exc:
            return GangRefusal("; ".join(exc.mistakes[:MAX_MISTAKES]))
        parts = tuple(GangPart(claim, pods) for claim, pods in claims if claim is not None and pods)
        if sum(part.pods for part in parts) > MAX_PODS:
            return GangRefusal(f"the Workload has more than {MAX_PODS} pods with claims")
        return parts

    def _claim(self, namespace: str, pods: PodSet, rules: ClaimRules) -> Claim | None:
        """Raises InvalidPodError, also for a denial that does not depend on the nodes."""
        raw = pods.pod(namespace, [found for name in pods.flavors if (found := self.flavors.get(name)) is not None])
        pod = Pod.parse(raw)
        _, claim = undressed_with_claim(raw, pod, rules)
        if claim is None:
            return None
        if claim.is_mapped:
            raise InvalidPodError(f"{claim_keys.GPU_MAP.name}: the GPUs of a placement map are not counted for Kueue")
        denied = check.precheck(pod, claim, self._rules)
        if denied is not None:
            raise InvalidPodError(denied.sentence)
        return claim
