"""API paths: group, version and plural of our kinds, and the path of each kind."""

GPU_NODES = ("gpuwarden.io", "v1alpha1", "gpunodes")
NODE_EVIDENCES = ("gpuwarden.io", "v1alpha1", "nodeevidences")
BINDING_ENDS = ("gpuwarden.io", "v1alpha1", "bindingends")
TRUST_BUNDLES = ("gpuwarden.io", "v1alpha1", "trustbundles")
RESOURCE_SLICES = ("resource.k8s.io", "v1", "resourceslices")
GPU_NODES_PATH = "/apis/" + "/".join(GPU_NODES)
NODE_EVIDENCES_PATH = "/apis/" + "/".join(NODE_EVIDENCES)
RESOURCE_SLICES_PATH = "/apis/" + "/".join(RESOURCE_SLICES)
RESOURCE_CLAIMS_PATH = "/apis/resource.k8s.io/v1/resourceclaims"
NODES_PATH = "/api/v1/nodes"
NAMESPACES_PATH = "/api/v1/namespaces"
PODS_PATH = "/api/v1/pods"
VOLUMES_PATH = "/api/v1/persistentvolumes"
STATEFUL_SETS_PATH = "/apis/apps/v1/statefulsets"
PRIORITY_CLASSES_PATH = "/apis/scheduling.k8s.io/v1/priorityclasses"
# Kueue's.
WORKLOADS_PATH = "/apis/kueue.x-k8s.io/v1beta2/workloads"
WORKLOAD_PATH = "/apis/kueue.x-k8s.io/v1beta2/namespaces/{namespace}/workloads/{name}"
ADMISSION_CHECKS_PATH = "/apis/kueue.x-k8s.io/v1beta2/admissionchecks"
RESOURCE_FLAVORS_PATH = "/apis/kueue.x-k8s.io/v1beta2/resourceflavors"
