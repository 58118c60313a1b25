"""API paths: group, version and plural of our kinds, and the path of each kind."""

GPU_NODES = ("gpuwarden.io", "v1alpha1", "gpunodes")
NODE_EVIDENCES = ("gpuwarden.io", "v1alpha1", "nodeevidences")
BINDING_ENDS = ("gpuwarden.io", "v1alpha1", "bindingends")
TRUST_BUNDLES = ("gpuwarden.io", "v1alpha1", "trustbundles")
GPU_NODES_PATH = "/apis/" + "/".join(GPU_NODES)
NODE_EVIDENCES_PATH = "/apis/" + "/".join(NODE_EVIDENCES)
NODES_PATH = "/api/v1/nodes"
NAMESPACES_PATH = "/api/v1/namespaces"
PODS_PATH = "/api/v1/pods"
VOLUMES_PATH = "/api/v1/persistentvolumes"
STATEFUL_SETS_PATH = "/apis/apps/v1/statefulsets"
PRIORITY_CLASSES_PATH = "/apis/scheduling.k8s.io/v1/priorityclasses"
