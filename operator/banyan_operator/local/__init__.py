"""`banyan-operator local`: runs the operator's pod templates as processes on this machine, without a cluster between."""
