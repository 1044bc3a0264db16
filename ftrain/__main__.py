"""`python -m ftrain doctor [DEVICE ...]`: print which devices and kernels there are, and their speed."""

from __future__ import annotations

import argparse
import signal
import sys

from ftrain.errors import DeviceError
from ftrain.profiling import doctor


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status: 1 if a device is not available, else 0."""
    parser = argparse.ArgumentParser(prog="python -m ftrain", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "doctor", help="print devices, versions, kernels, and the speed of matmuls and copies"
    )
    command.add_argument("devices", nargs="*", help="device names; their packages are imported; default: all available")
    try:
        for line in doctor.report(parser.parse_args(arguments).devices):
            print(line, flush=True)  # noqa: T201
    except DeviceError as error:
        print(error)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    # End without an error, as other programs do, when the reader of the output ends first: `... | head -1`.
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
