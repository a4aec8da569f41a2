"""Kernels in Triton, for CUDA; its interpreter runs them on the CPU for tests (`TRITON_INTERPRET=1` before they are imported)."""
