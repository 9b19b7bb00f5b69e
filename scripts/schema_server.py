#!/usr/bin/env python3
"""Drives every path of a server by its own description (/openapi.json) with Schemathesis: what is described is what is.

`scripts/schema_server.py STORE` starts a server of its own; `--url` takes one that runs. Data that the description
allows may still be refused (a context that is too long); data that it forbids must be.
"""

import argparse
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "negative_data_rejection,unsupported_method,allow_header_conformance"
)


def drive(url: str, examples: int, seed: int, phases: str) -> int:
    """Run Schemathesis; its exit code."""
    command = [
        str(Path(sys.executable).parent / "schemathesis"), "run", f"{url}/openapi.json", "--url", url,
        "--checks", CHECKS, "--max-examples", str(examples), "--seed", str(seed), "--phases", phases,
        "--exclude-path", "/live/stream", "--request-timeout", "60",
        "--suppress-health-check", "all", "--warnings", "off", "--no-color", "--continue-on-failure",
    ]  # fmt: skip
    return subprocess.run(command, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", nargs="?")
    parser.add_argument("--url")
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--phases", default="examples,coverage,fuzzing")
    given = parser.parse_args()
    if given.url is not None:
        return drive(given.url, given.examples, given.seed, given.phases)
    from tests.server.running import Server

    with Server(given.store, "--memory", "2GiB", "--ctx-size", 256) as server:
        return drive(server.url, given.examples, given.seed, given.phases)


if __name__ == "__main__":
    sys.exit(main())
