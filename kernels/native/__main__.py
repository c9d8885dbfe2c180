"""Compiles the library ahead of the first start: `python -m kernels.native`."""

from kernels.native.build import main

main()
