"""A process whose kernel writes to memory that it was given: ``python -m tests.gpu.offender DESCRIPTOR NBYTES ACCESS``.

It prints the first byte before and after, or the error that came of the kernel.
"""

from __future__ import annotations

import ctypes
import os
import sys

from cubroker.driver import Context, DriverError, load

VALUE = 0x5A

STORE = f"""
.version 7.0
.target sm_70
.address_size 64

.visible .entry store(.param .u64 where)
{{
    .reg .b64 %rd<3>;
    .reg .b16 %rs<2>;
    ld.param.u64 %rd1, [where];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u16 %rs1, {VALUE};
    st.global.u8 [%rd2], %rs1;
    ret;
}}
"""
"""One byte, stored by one thread."""


def store(context: Context, pointer: int) -> None:
    """Run the kernel and wait for it."""
    calls = context.calls
    with context.current():
        kernel = calls.cuModuleGetFunction(calls.cuModuleLoadData(STORE.encode() + b"\0"), b"store")
        calls.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, ((pointer,), (ctypes.c_uint64,)), 0)
        calls.cuCtxSynchronize()


def main(descriptor: str, nbytes: str, access: str) -> None:
    context = load("cuda").context(0)
    reservation = context.reserve(int(nbytes))
    reservation.map(int(descriptor), readonly=access == "readonly")
    print(context.read(reservation.pointer, 1).hex(), flush=True)
    try:
        store(context, reservation.pointer)
        print(context.read(reservation.pointer, 1).hex(), flush=True)
    except DriverError as error:
        print(f"{error.call} {error.name}", flush=True)
    os._exit(0)  # a context that an error ended cannot be closed either


if __name__ == "__main__":
    main(*sys.argv[1:])
