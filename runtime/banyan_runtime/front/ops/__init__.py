"""What operators of a server ask it: probes, metrics, load."""
