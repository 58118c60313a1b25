"""HTTP: one file a concern. `admission` awaits in the order of a pod's story; the others are small."""
