"""`python -m scripts.objectstore`: builds the S3 server of the tests and says where it is."""

import sys

from scripts.controlplane.build import BuildError
from scripts.objectstore import versitygw

if __name__ == "__main__":
    try:
        print(versitygw())
    except BuildError as exc:
        sys.exit(str(exc))
