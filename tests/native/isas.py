"""The instruction sets that this machine can run."""

from stoker.errors import OptionError
from stoker.native import kernels


def available() -> list[str]:
    chosen, names = kernels.isa(), []
    for name in kernels.ISAS:
        try:
            kernels.force_isa(name)
        except OptionError:
            continue
        names.append(name)
    kernels.force_isa(chosen)
    return names
