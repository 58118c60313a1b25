"""Print the answer to a review that comes in on standard input, its patch decoded, for a person to read."""

import base64
import json
import sys

answer = json.load(sys.stdin)
response = answer.get("response", {})
if "patch" in response:
    response["patch"] = json.loads(base64.b64decode(response["patch"]))
print(json.dumps(answer, indent=2))
