"""The runner for CPUs: one C++ library without torch's or Python's ABI, called once a step."""
