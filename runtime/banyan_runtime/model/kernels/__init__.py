"""Kernels in Triton, for CUDA; its interpreter runs them on the CPU for tests (`TRITON_INTERPRET=1` before they are imported)."""


def power_of_two(number: int) -> int:
    """The next one, or the number itself."""
    return 1 << (number - 1).bit_length()
