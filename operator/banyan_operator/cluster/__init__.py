"""Carries a Plan out on Kubernetes: watches by kopf, everything else here. Decides nothing about what objects look like."""
