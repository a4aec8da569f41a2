"""What both worlds share about Kubernetes objects: their kinds, who owns whom, what their conditions say, where they answer."""
