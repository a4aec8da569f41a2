"""Banyan's operator: reconciles InferenceServer and BatchJob into pods on Kubernetes, or into processes on this machine."""

__version__ = "0.1.0"
