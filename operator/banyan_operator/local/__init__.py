"""Carries a Plan out as processes on this machine: the second world beside `cluster`.

An object store stands in for the API server, two pure controllers for the Deployment and Job controllers, a pod machine with
processes for the kubelet, and small TCP proxies for Services. What the operator decides is the same in both worlds.
"""
