"""What the Deployment, ReplicaSet and Job controllers decide. Pure: objects and a clock in, actions out."""
