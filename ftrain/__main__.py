"""`python -m ftrain doctor [DEVICE ...]`: what is here, and how fast it is."""

from __future__ import annotations

import argparse
import sys

from ftrain.errors import DeviceError
from ftrain.profiling import doctor


def main(given: list[str] | None = None) -> int:
    """Do what the command line says; the exit status is 1 for a device that is not here."""
    parser = argparse.ArgumentParser(prog="python -m ftrain", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    told = commands.add_parser("doctor", help="print devices, versions, kernels, and rates of products and copies")
    told.add_argument("devices", nargs="*", help="by name, importing what they need; all that are here, unless told")
    try:
        for line in doctor.report(parser.parse_args(given).devices):
            print(line, flush=True)  # noqa: T201
    except DeviceError as error:
        print(error)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
