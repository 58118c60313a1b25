"""Evidence from configuration: nothing is attested. For development only, and it warns about that."""

from collections.abc import Collection, Mapping

from webhook.core.evidence import Evidence, combined

NOTE = "evidence is static (configured by hand, nothing is attested): for development only"


class StaticEvidence:
    """The map of `BGS_NODE_HASH_MAP` and the evidence entries of the inventory file, which must agree."""

    name = "static"

    def __init__(self, node_hash_map: Mapping[str, str]) -> None:
        self._from_map = written_by_hand(node_hash_map)
        self._agreed: Mapping[str, Evidence] = self._from_map

    @property
    def mapped(self) -> Collection[str]:
        """The nodes that the map names. They may have no known GPU."""
        return self._from_map.keys()

    def read_from_file(self, entries: Mapping[str, Evidence]) -> None:
        """Replace the entries of the inventory file."""
        sources = (self._from_map, entries)
        nodes = {node for source in sources for node in source}
        found = {node: combined([source[node] for source in sources if node in source]) for node in nodes}
        self._agreed = {node: evidence for node, evidence in found.items() if evidence is not None}

    def begin(self) -> None:
        """Does nothing: the answer is always current."""

    async def poll(self) -> Mapping[str, Evidence]:
        return self._agreed


def written_by_hand(node_hash_map: Mapping[str, str]) -> dict[str, Evidence]:
    return {node: Evidence(node, one, StaticEvidence.name) for node, one in node_hash_map.items()}
