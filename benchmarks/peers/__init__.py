"""What Banyan is measured beside: a class each, that installs, converts and starts one of them behind one protocol (`peer.py`)."""
