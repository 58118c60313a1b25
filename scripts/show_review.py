"""Prints the answer to a review from standard input, with its patch decoded."""

import base64
import json
import sys

answer = json.load(sys.stdin)
response = answer.get("response", {})
if "patch" in response:
    response["patch"] = json.loads(base64.b64decode(response["patch"]))
print(json.dumps(answer, indent=2))
